"""What the GPU benchmark does only on a GPU, as far as it can be held without one."""

import contextlib
import importlib
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import families, jobs, turns
from benchmarks.gpu.sections import reason
from benchmarks.gpu.setting import Setting
from benchmarks.model_families import FAMILIES, Outcome
from services.jobs.job_file import load_job
from volley.job import RLJob
from volley.metrics import METRICS


def on_gpu(folder: Path) -> Setting:
    return Setting("cuda", "135M", folder, small=False)


@pytest.mark.parametrize("section", ["whole_run", "turns", "two_devices"])
def test_the_job_for_gpus_is_valid(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    made = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        made.append(load_job(Path(command[command.index("run") + 1])))
        folder = Path(command[command.index("--out") + 1]) / "run"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text('{"problem": "no GPU"}')
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(jobs, "inputs", lambda setting: (tmp_path, tmp_path / "prompts.jsonl"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="volley run ended with 1: no GPU"):
        list(importlib.import_module(f"benchmarks.gpu.{section}").run(on_gpu(tmp_path)))
    (job,) = made
    assert isinstance(job, RLJob)
    assert job.model.dtype == "bfloat16"
    assert 0 < job.actors.gpus + job.learner.gpus_per_rank <= (2 if section == "two_devices" else 1)


def test_turns_report_metrics_that_runs_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [dict.fromkeys(METRICS, 0.5)] * jobs.STEPS
    monkeypatch.setattr(turns, "run_job", lambda *_, **__: SimpleNamespace(read=lambda _: rows))
    figures = [row.figure for row in turns.run(on_gpu(tmp_path))]
    assert figures[0].startswith("0.5 samples/s; of a step's 0.500 s")
    assert figures[-1] == "0.50 s"


def test_a_family_that_is_refused_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tried(family: str, folder: Path, gpus: float) -> Outcome:
        assert gpus == 0.4
        return Outcome(family, "", 1e-3, 2e-3, 3.0, problem="too large" if family == "Llama" else "")

    monkeypatch.setattr(families, "tried", tried)
    monkeypatch.setattr(families, "local_ray", lambda **_: contextlib.nullcontext())
    assert set(families.FAMILIES) <= set(FAMILIES)
    figures = [row.figure for row in families.run(on_gpu(tmp_path))]
    assert figures == ["1.0e-03 before, 2.0e-03 after two steps, which moved them by 3 nats on average", "too large"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("[rank0]: KeyError: no symbol\n[rank0]:[W1126] Warning: not destroyed", "[rank0]: KeyError: no symbol"),
        ("volley.errors.JobError: no model\nbye", "volley.errors.JobError: no model"),
        ("volley.errors.WorkerDied: actor-0\n[W1126 11:43] Warning: no\nINFO: x", "volley.errors.WorkerDied: actor-0"),
        ("[rank0]: KeyboardInterrupt\n  warnings.warn(x)", "[rank0]: KeyboardInterrupt"),
        ("RuntimeError: first\nValueError: last\n", "ValueError: last"),
        ("Killed", "Killed"),
        ("", ""),
    ],
)
def test_the_reason_of_a_failure_is_the_last_exception(log: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert reason(tmp_path / "log") == expected
