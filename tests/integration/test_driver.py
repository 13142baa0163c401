"""Drivers as separate processes under a real supervisor: asked to end, or frozen by SIGSTOP."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from services.recording.display import Display
from services.runs.run import prepare, run_on
from services.signals import StopSignal
from services.stack.ephemeral import Stack
from services.stack.redis import embedded_redis
from services.store.folder import RunFolder
from services.store.redis import Store
from services.supervisor import decisions
from services.supervisor.ray_jobs import JobStatus
from services.supervisor.supervisor import Supervisor
from tests.integration.jobs import PROMPTS, unhurried_job, write_inputs
from tests.integration.test_steering import assert_ledger_exact
from volley.job import JOB, RLJob
from volley.state import Observed, RunRecord

pytestmark = pytest.mark.integration

STEPS = 90
MUTE_SECONDS = 15.0


class Processes:
    """A launcher whose drivers are children of this process and use its Ray cluster."""

    def __init__(self, redis_url: str) -> None:
        self.lives: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **os.environ,
            "VOLLEY_REDIS_URL": redis_url,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "PYTHONPATH": str(Path.cwd()),
        }

    def start(self, run_id: str) -> None:
        command = [sys.executable, "-m", "services.runs.driver", run_id]
        self.lives.append(subprocess.Popen(command, env=self._environment))

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        self.start(run_id)

    async def status(self, run_id: str) -> JobStatus:
        if not self.lives:
            return "none"
        code = self.lives[-1].poll()
        return "alive" if code is None else "killed" if code < 0 else "ended"

    async def stop(self, run_id: str) -> None:
        raise AssertionError("a silent driver on this host is killed directly")

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        return ""

    def end(self) -> None:
        for each in self.lives:
            each.kill()
            each.wait()


@pytest.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    async with embedded_redis(tmp_path / "redis", tmp_path / "redis.log") as url:
        yield url


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    async with Store(redis_url) as store:
        yield store


async def created(store: Store, folder: Path, **changes: Any) -> RunFolder:
    """Create the record of a run with a long job, without starting it."""
    write_inputs(folder)
    tree = unhurried_job(folder, steps=STEPS, max_lag=2, **changes)
    job = RLJob.model_validate(tree)
    run = RunFolder.at(folder / "run", job)
    await store.create(
        RunRecord(id="run", name="x", kind="rl", job=job.model_dump(mode="json"), created=0, folder=str(run.path))
    )
    return run


async def until(store: Store, holds: Callable[[Observed], bool], seconds: float = 240) -> Observed:
    ends = time.monotonic() + seconds
    while not holds(seen := await store.observed("run")):
        assert time.monotonic() < ends, seen
        assert seen.state != "failed", seen
        await asyncio.sleep(0.1)
    return seen


async def test_a_driver_asked_to_end_writes_a_checkpoint_and_a_frozen_one_is_replaced(
    ray_local: None, redis_url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MUTE_SECONDS", MUTE_SECONDS)
    run = await created(store, tmp_path, checkpoint={"every": 50})
    drivers = Processes(redis_url)
    async with Supervisor(store, drivers, redis_url) as supervisor:
        supervising = asyncio.create_task(supervisor.run())
        try:
            await until(store, lambda seen: seen.step >= 10)
            drivers.lives[0].send_signal(signal.SIGTERM)
            await until(store, lambda seen: seen.life == 2 and seen.state == "running")
            assert drivers.lives[0].returncode == 130
            # The second driver may already have written checkpoints of its own.
            events = [(event["kind"], event["step"]) for event in run.read("events")]
            at = next(step for kind, step in events if kind == "resumed")
            assert events[events.index(("resumed", at)) - 1] == ("checkpoint", at)
            assert at % 50, "the checkpoint is at the step reached, not at one planned by the job"

            await until(store, lambda seen: seen.step >= 55)
            drivers.lives[1].send_signal(signal.SIGSTOP)
            await until(store, lambda seen: seen.life == 3 and seen.state == "running")
            assert drivers.lives[1].returncode == -signal.SIGKILL
            await until(store, lambda seen: seen.state == "done")
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
            drivers.end()
    assert_ledger_exact(run)
    assert run.read("metrics")[-1]["groups_trained"] == STEPS * PROMPTS


async def test_a_second_signal_does_not_wait_for_a_checkpoint(
    ray_local: None, redis_url: str, store: Store, tmp_path: Path
) -> None:
    run = await created(store, tmp_path)
    drivers = Processes(redis_url)
    drivers.start("run")
    try:
        await until(store, lambda seen: seen.step >= 5)
        rank = next(worker.pid for worker in (await store.observed("run")).workers if worker.name == "learner-0")
        os.kill(rank, signal.SIGSTOP)  # the checkpoint would wait for this rank
        drivers.lives[0].send_signal(signal.SIGTERM)
        await asyncio.sleep(2)
        assert drivers.lives[0].poll() is None
        drivers.lives[0].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(drivers.lives[0].wait, 30) == 130
    finally:
        drivers.end()
    assert list(run.checkpoints.iterdir()) == []
    assert (await store.observed("run")).state == "queued", "its user did not stop it"
    log = (run.logs / "driver.log").read_text()
    assert "volley: stopping at a checkpoint, within 30 s" in log
    assert "volley: stopping\n" in log


async def test_a_supervised_run_asked_to_end_resumes_from_its_checkpoint(
    ray_local: None, redis_url: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "7 7=", "answer": "7"}\n' * 4)
    tree = {
        "kind": "sft",
        "name": "taught",
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "steps": 500,
        "rows_per_step": 4,
    }
    job = JOB.validate_python(tree)
    folder, stop_signal = RunFolder.create(tmp_path, job), StopSignal()
    stack = Stack(redis_url, "local")
    run = asyncio.create_task(run_on(stack, prepare(job), folder, Display(quiet=True), stop_signal=stop_signal))
    for _ in range(2400):
        if len(folder.read("metrics")) >= 5 or run.done():
            break
        await asyncio.sleep(0.05)
    assert stop_signal.request()
    assert (await run).state == "stopped"
    done = len(folder.read("metrics"))
    assert [path.name for path in folder.checkpoints.iterdir()] == [f"step-{done}"]
    assert done < 500
    assert (await run_on(stack, prepare(job), folder, Display(quiet=True))).state == "done"
    rows = folder.read("metrics")
    assert [row["step"] for row in rows] == list(range(500))
    assert rows[-1]["loss"] < rows[0]["loss"]
