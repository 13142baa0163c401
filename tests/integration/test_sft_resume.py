"""A killed supervised run resumes from its checkpoint and ends exactly like an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from services.store.folder import RunFolder
from tests.models import tiny_llama

pytestmark = pytest.mark.integration

VOLLEY = str(Path(sys.executable).parent / "volley")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path.cwd())}
STEPS, EVERY = 200, 50


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that trains adapters to add numbers."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_llama(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "kind": "sft",
        "name": "sums",
        "model": {"path": "model", "lora": {"rank": 4}},
        "data": {"path": "rows.jsonl"},
        "steps": STEPS,
        "rows_per_step": 16,
        "optimizer": {"lr": 5e-3, "schedule": "cosine"},
        "checkpoint": {"every": EVERY},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def volley(*arguments: str) -> None:
    done = subprocess.run(
        [VOLLEY, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    out = tmp_path_factory.mktemp("whole")
    volley("run", str(job_file), "--out", str(out), "--quiet")
    return RunFolder(next(out.iterdir()))


def killed(job_file: Path, out: Path) -> RunFolder:
    """A run killed some steps after its first checkpoint."""
    process = subprocess.Popen([VOLLEY, "run", str(job_file), "--out", str(out), "--quiet"], env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 240
        while not (found := list(out.glob("*/checkpoints/step-*"))):
            assert process.poll() is None, process.returncode
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    return RunFolder(found[0].parents[1])


def test_a_resumed_run_ends_like_an_uninterrupted_one(job_file: Path, whole: RunFolder, tmp_path: Path) -> None:
    folder = killed(job_file, tmp_path)
    before = rows(folder)
    assert EVERY <= len(before) < STEPS
    volley("resume", str(folder.path))
    after = rows(folder)
    assert [row["step"] for row in after] == list(range(STEPS))
    assert after[:EVERY] == before[:EVERY]
    assert after[EVERY]["time"] > before[-1]["time"]  # repeated from the checkpoint
    assert [row["loss"] for row in after] == pytest.approx([row["loss"] for row in rows(whole)], rel=1e-6)
    assert after[-1]["loss"] < after[0]["loss"] / 2
    mine, theirs = (load_file(each.model / "model.safetensors") for each in (folder, whole))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    return folder.read("metrics")
