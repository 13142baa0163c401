"""Sinks as a run uses them: real processes, whose output is read with each tool's own reader."""

import asyncio
import contextlib
import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.recording.sinks import process as process_module
from services.recording.sinks import sinks as sinks_module
from services.recording.sinks.base import evaluation_row, numbers
from services.recording.sinks.sinks import Sinks, check_sinks
from services.store.folder import RunFolder
from volley.errors import JobError, RunStopped
from volley.job import JOB, RLJob
from volley.sinks import MLflowSink, TensorBoardSink, WandbSink


def job_with(*sinks: dict[str, Any]) -> RLJob:
    job = JOB.validate_python(
        {
            "kind": "rl",
            "name": "small",
            "steps": 9,
            "model": {"path": "/model"},
            "data": {"path": "/train.jsonl"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "max_at_k", "k": 8},
            "sinks": list(sinks),
        }
    )
    assert isinstance(job, RLJob)
    return job


def metrics(step: int, reward: float) -> dict[str, Any]:
    lags = {"0": 40, "1": 2}
    return {"step": step, "version": step + 1, "time": 1e9 + step, "reward_mean": reward, "lag_histogram": lags}


def evaluation(version: int, solved: float) -> dict[str, Any]:
    estimates = [{"k": k, "mean": solved * k, "low": 0.0, "high": 1.0} for k in (1, 4)]
    majority = [{"k": 4, "mean": solved, "low": 0.0, "high": 1.0}]
    hard = {"tag": "level", "value": "a/b = 5", "prompts": 2, "estimates": estimates[:1], "majority": majority}
    return {
        "version": version,
        "prompts": 3,
        "n": 4,
        "distinct_answers": 2.5,
        "estimates": estimates,
        "majority": majority,
        "by_tag": [hard],
    }


SHOWN = {"pass_at_4": 4.0, "maj_at_4": 1.0, "by_tag/level/a_b _ 5/pass_at_1": 1.0, "by_tag/level/a_b _ 5/maj_at_4": 1.0}
SOLVED = ((0, 0.1), (3, 0.2), (6, 0.25))  # what `interrupted_run` tells of each version


class Reports:
    """Records what the sinks report."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.first = asyncio.Event()

    async def __call__(self, problem: str) -> None:
        self.problems.append(problem)
        self.first.set()


async def interrupted_run(folder: RunFolder, job: RLJob, reports: Reports) -> None:
    """Write steps 0 to 4 and two evaluations, then resume from the checkpoint of step 3 and continue to step 5."""
    async with Sinks(job, folder, reports) as sinks:
        sinks.begin(0)
        sinks.evaluation(evaluation(0, 0.1))
        for step in range(5):
            sinks.step(metrics(step, 0.1 * step))
            if step == 2:
                sinks.evaluation(evaluation(3, 0.2))
    async with Sinks(job, folder, reports) as sinks:
        sinks.begin(3)
        for step in range(3, 6):
            sinks.step(metrics(step, 10.0 + step))
        sinks.evaluation(evaluation(6, 0.25))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.at(tmp_path / "small-1", job_with())


async def test_tensorboard_shows_the_newest_figures_of_a_repeated_step(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reports = Reports()
    await interrupted_run(folder, job_with({"kind": "tensorboard"}), reports)
    assert reports.problems == []

    def read(part: str, tag: str) -> list[tuple[int, Any]]:
        events = EventAccumulator(str(folder.path / "tensorboard" / part))
        events.Reload()
        return [(each.step, pytest.approx(each.value, rel=1e-6)) for each in events.Scalars(tag)]

    assert read("train", "reward_mean") == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 13.0), (4, 14.0), (5, 15.0)]
    assert read("train", "lag_histogram/1") == [(step, 2.0) for step in range(6)]
    for name, factor in SHOWN.items():
        assert read("evaluation", name) == [(version, solved * factor) for version, solved in SOLVED]


async def test_a_rewind_during_a_run_purges_outdated_steps_too(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    async with Sinks(job_with({"kind": "tensorboard", "path": str(folder.path / "all")}), folder, Reports()) as sinks:
        sinks.begin(0)
        for step in range(4):
            sinks.step(metrics(step, 1.0))
        sinks.begin(2)
        for step in range(2, 4):
            sinks.step(metrics(step, 2.0))
    events = EventAccumulator(str(folder.path / "all" / "small-1" / "train"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward_mean")] == [(0, 1), (1, 1), (2, 2), (3, 2)]


async def test_mlflow_has_each_step_once_in_one_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    reports = Reports()
    await interrupted_run(folder, job_with({"kind": "mlflow", "experiment": "countdown"}), reports)
    assert reports.problems == []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(folder.path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("countdown")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["volley.run"]) == ("small-1", "FINISHED", "small-1")
    assert run.data.params["objective.k"] == "8"
    rewards = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward_mean")]
    assert sorted(rewards) == [(step, pytest.approx(0.1 * step)) for step in range(5)] + [(5, 15.0)]
    for name, factor in SHOWN.items():
        found = client.get_metric_history(run.info.run_id, f"evaluation/{name}")
        shown = sorted((each.step, each.value) for each in found)
        assert shown == [(version, solved * factor) for version, solved in SOLVED]


async def test_wandb_offline_files_hold_each_step_once(folder: RunFolder) -> None:
    reports = Reports()
    await interrupted_run(folder, job_with({"kind": "wandb", "project": "demo", "tags": ["a"]}), reports)
    assert reports.problems == []
    files = [wandb_records(file) for file in sorted(folder.path.glob("wandb/offline-run-*/run-small-1.wandb"))]
    runs = [record.run for file in files for record in file if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name, tuple(run.tags)) for run in runs} == {
        ("small-1", "demo", "small-1", ("a",))
    }
    history = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for file in files
        for record in file
        if record.WhichOneof("record_type") == "history"
    ]
    steps = [(row["step"], row["reward_mean"]) for row in history if "reward_mean" in row]
    assert steps == [(step, pytest.approx(0.1 * step)) for step in range(5)] + [(5, 15.0)]
    evaluations = [row for row in history if "evaluation/pass_at_4" in row]
    for name, factor in SHOWN.items():
        shown = [(row["evaluation/version"], row[f"evaluation/{name}"]) for row in evaluations]
        assert shown == [(version, pytest.approx(solved * factor)) for version, solved in SOLVED]


def wandb_records(file: Path) -> Sequence[Any]:
    """The records of an offline file, a log in LevelDB's format: blocks that hold fragments of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    def whole() -> Iterator[bytes]:
        data, at, parts = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            parts += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or its last fragment
                yield parts
                parts = b""

    return [Record.FromString(each) for each in whole()]


async def test_a_failing_sink_is_reported_once_and_does_not_disturb_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "FIRST_DELAY", 0.05)
    occupied = folder.path / "occupied"
    occupied.write_text("a file, where a folder is wanted")
    reports = Reports()
    async with Sinks(
        job_with({"kind": "tensorboard", "path": str(occupied)}, {"kind": "mlflow"}), folder, reports
    ) as s:
        s.begin(0)
        s.step(metrics(0, 1.0))
    assert [problem.partition(":")[0] for problem in reports.problems] == ["sink tensorboard", "sink tensorboard"]
    assert "NotADirectoryError" in reports.problems[0]
    assert reports.problems[1] == "sink tensorboard: 1 rows were not delivered; the run folder has them"
    assert list((folder.path / "mlruns").glob("*/*/metrics/reward_mean"))  # the other sink has it


async def test_a_sink_that_works_again_gets_the_waiting_rows(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "FIRST_DELAY", 0.05)
    where = folder.path / "place"
    where.write_text("not yet")
    reports = Reports()
    async with Sinks(job_with({"kind": "tensorboard", "path": str(where)}), folder, reports) as sinks:
        sinks.begin(0)
        sinks.step(metrics(0, 1.0))
        await asyncio.wait_for(reports.first.wait(), 60)
        where.unlink()
        sinks.step(metrics(1, 2.0))
    assert len(reports.problems) == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(where / "small-1" / "train"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward_mean")] == [(0, 1.0), (1, 2.0)]


async def test_a_sink_that_hangs_is_killed_at_the_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder.path / "fake" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sinks_module, "CLOSE_SECONDS", 9.0)
    reports = Reports()
    began = time.monotonic()
    with contextlib.suppress(RunStopped):
        async with Sinks(job_with({"kind": "tensorboard"}), folder, reports) as sinks:
            sinks.step(metrics(0, 1.0))
            await _until((folder.logs / "sink-tensorboard.log").read_text)
            raise RunStopped
    assert time.monotonic() - began < 20
    assert "did not take the last rows within 3 s" in reports.problems[0]
    log = (folder.logs / "sink-tensorboard.log").read_text()
    assert not Path(f"/proc/{int(log.split()[1])}").exists()


async def _until(there: Callable[[], str]) -> None:
    async with asyncio.timeout(60):
        for _ in range(1200):
            with contextlib.suppress(FileNotFoundError):
                if there():
                    return
            await asyncio.sleep(0.05)


async def test_the_queue_of_rows_is_bounded(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MAX_WAITING", 3)
    monkeypatch.setattr(process_module, "FIRST_DELAY", 0.01)
    occupied = folder.path / "occupied"
    occupied.write_text("")
    reports = Reports()
    async with Sinks(job_with({"kind": "tensorboard", "path": str(occupied)}), folder, reports) as sinks:
        for step in range(8):
            sinks.step(metrics(step, 1.0))
    assert reports.problems[-1].startswith("sink tensorboard: 8 rows were not delivered")


def test_a_sink_whose_run_has_died_closes_and_ends(folder: RunFolder) -> None:
    run = {"id": "small-1", "name": "small", "folder": str(folder.path), "job": {}, "step": 0}
    opening = {"spec": {"kind": "tensorboard"}, "run": run, "memory": str(folder.path / "memory.json")}
    row = {"kind": "step", "number": 0, "time": 1e9, "values": {"loss": 2.5}}
    messages = "".join(json.dumps(each) + "\n" for each in (opening, {"rows": [row]}))
    command = [sys.executable, "-m", "services.recording.sinks.child"]
    done = subprocess.run(command, input=messages, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "{}\n{}\n"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.path / "tensorboard" / "train"))
    events.Reload()
    assert [each.value for each in events.Scalars("loss")] == [2.5]


async def test_a_run_without_steps_starts_no_sink(folder: RunFolder) -> None:
    async with Sinks(job_with({"kind": "tensorboard"}), folder, Reports()):
        pass
    assert not (folder.path / "tensorboard").exists()


def test_only_finite_numbers_are_passed_on() -> None:
    row = {"step": 1, "loss": 0.5, "bad": float("nan"), "name": "x", "lags": {"0": 2, "1": 1}, "none": None}
    assert numbers(row) == {"loss": 0.5, "lags/0": 2.0, "lags/1": 1.0}
    assert evaluation_row(evaluation(2, 0.5), 7.0).values == {
        "prompts": 3.0,
        "n": 4.0,
        "distinct_answers": 2.5,
        "pass_at_1": 0.5,
        "pass_at_4": 2.0,
        "maj_at_4": 0.5,
        "by_tag/level/a_b _ 5/prompts": 2.0,
        "by_tag/level/a_b _ 5/pass_at_1": 0.5,
        "by_tag/level/a_b _ 5/maj_at_4": 0.5,
    }
    odd = {"tag": "..", "value": "", "prompts": 1, "estimates": [], "majority": []}
    only = {"version": 0, "estimates": [], "by_tag": [odd]}
    assert evaluation_row(only, 7.0).values == {"by_tag/_/_/prompts": 1.0}


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sinks([TensorBoardSink(), WandbSink(), MLflowSink()])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match=rf"{kind} needs a package.*volley-rl\[sinks\]"):
        check_sinks(job_with({"kind": kind}).sinks)


def test_a_password_in_the_tracking_uri_is_rejected() -> None:
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_USERNAME"):
        MLflowSink(tracking_uri="https://me:secret@mlflow.example")
    with pytest.raises(ValueError, match="file:///absolute/path"):
        MLflowSink(tracking_uri="mlruns")
