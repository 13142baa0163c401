"""Ranks that die, stop or can not start: named, and nothing of them is left."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util import list_named_actors

from learner import group as learner_group
from learner.group import LearnerGroup
from learner.ranks import _alive
from tests.integration.learner.conftest import batch, config
from volley.errors import DeadlineExceeded, Diverged, HostError, JobError, WorkerDied
from volley.job import ModelSpec

pytestmark = pytest.mark.integration


async def test_a_killed_rank_is_named(ray_local: None, model: Path, tmp_path: Path) -> None:
    """Its peer sees a closed connection first; the error is about the one that died, with its log."""
    learner = await LearnerGroup.start(config(model, tmp_path, 2))
    try:
        pids = [process.pid for process in learner._ranks.processes]
        await learner.step(batch(0)[1], version=0)
        running = asyncio.create_task(steps(learner))
        await asyncio.sleep(0.3)
        os.kill(pids[1], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(WorkerDied, match="learner-1 died"):
            await running
        assert time.monotonic() - begun < 15
    finally:
        await learner.stop()
    assert not any(_alive(pid) for pid in pids)


async def steps(learner: LearnerGroup) -> None:
    for step in range(1, 1000):
        await learner.step(batch(step)[1], version=step)


@pytest.mark.parametrize("doing", ["step 0", "checkpoint"])
async def test_a_stopped_rank_is_named_and_ended(ray_local: None, model: Path, tmp_path: Path, doing: str) -> None:
    learner = await LearnerGroup.start(config(model, tmp_path, 2, learner={"step_deadline_s": 3}))
    pids = [process.pid for process in learner._ranks.processes]
    try:
        os.kill(pids[1], signal.SIGSTOP)
        saves = doing == "checkpoint"
        call = learner.save(tmp_path / "step-0", {}) if saves else learner.step(batch(0)[1], version=0)
        with pytest.raises(DeadlineExceeded, match=rf"coordinator waited 3 s for learner-1: {doing}"):
            await call
        assert not list(tmp_path.glob("*step-0*")), "complete or absent"
    finally:
        await learner.stop()
    for _ in range(100):
        if not any(_alive(pid) for pid in pids):
            break
        await asyncio.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


async def test_a_gradient_that_is_not_finite_ends_the_run_and_leaves_the_weights(
    ray_local: None, model: Path, tmp_path: Path
) -> None:
    learner = await LearnerGroup.start(config(model, tmp_path, 1))
    try:
        before = (await learner.publish(0)).checksum
        made, columns = batch(0)
        broken = replace(made[0], logprobs_T=np.full_like(made[0].logprobs_T, np.nan))
        bad = [replace(columns[0], group=ray.put(broken)), *columns[1:]]
        with pytest.raises(Diverged, match=r"lower optimizer\.lr"):
            await learner.step(bad, version=0)
        assert (await learner.publish(0)).checksum == before
    finally:
        await learner.stop()


async def test_a_model_that_does_not_load_is_named(ray_local: None, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    settings = replace(config(tmp_path, tmp_path, 1), model=ModelSpec(path=tmp_path / "nothing"))
    with pytest.raises(JobError, match="nothing does not load"):
        await LearnerGroup.start(settings)
    assert not ours(tmp_path)


async def test_a_cluster_without_room_is_said_so(
    ray_local: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_group, "START_SECONDS", 1.0)
    with pytest.raises(HostError, match=r"no room for 2 learner rank\(s\) of 500 CPU each.*lower learner.ranks"):
        await LearnerGroup.start(config(model, tmp_path, 2, learner={"cpus_per_rank": 500}))
    assert not ours(tmp_path)


async def test_a_start_that_is_cancelled_leaves_nothing(ray_local: None, model: Path, tmp_path: Path) -> None:
    starting = asyncio.create_task(LearnerGroup.start(config(model, tmp_path, 2)))
    for _ in range(200):
        if len(ours(tmp_path)) == 2:
            break
        await asyncio.sleep(0.05)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    for _ in range(100):
        if not ours(tmp_path):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"left behind: {ours(tmp_path)}")


def ours(folder: Path) -> list[str]:
    return [name for name in list_named_actors() if name.startswith(f"{folder.name}-")]
