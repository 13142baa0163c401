"""Ranks that stop or cannot start: named, and nothing of them is left."""

import asyncio
import contextlib
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from ray.util import list_named_actors

from learner.pool import LearnerPool
from tests.integration.learner.conftest import config, rank_stopped, save
from volley.errors import DeadlineExceeded, HostError, JobError, WorkerDied
from volley.model import ModelSpec

pytestmark = pytest.mark.integration


async def test_a_rank_stopped_before_a_checkpoint_is_named_and_ended(
    ray_local: None, model: Path, tmp_path: Path
) -> None:
    learner = await LearnerPool.start(config(model, tmp_path, 2, learner={"step_deadline_s": 3}))
    async with rank_stopped(learner):
        with pytest.raises(DeadlineExceeded, match=r"coordinator waited 3 s for learner-1: checkpoint"):
            await save(learner, tmp_path / "step-0", {}, background=False)
        assert not list(tmp_path.glob("*step-0*")), "a checkpoint is complete or absent"


async def test_a_rank_stopped_while_a_checkpoint_is_written_is_named_and_ended(
    ray_local: None, model: Path, tmp_path: Path
) -> None:
    learner = await LearnerPool.start(config(model, tmp_path, 2, learner={"step_deadline_s": 3}))
    await learner.begin_save(tmp_path / "step-0", {})
    async with rank_stopped(learner):
        with pytest.raises(DeadlineExceeded, match=r"coordinator waited 3 s for learner-1: checkpoint"):
            await learner.saved()
        assert not list(tmp_path.glob("*step-0*")), "a checkpoint is complete or absent"


async def test_a_rank_stopped_or_killed_while_a_version_is_gathered_is_named(
    ray_local: None, model: Path, tmp_path: Path
) -> None:
    for number, expected in ((signal.SIGSTOP, DeadlineExceeded), (signal.SIGKILL, WorkerDied)):
        learner = await LearnerPool.start(config(model, tmp_path, 2, learner={"step_deadline_s": 3}))
        await learner.begin_publish(1)
        async with rank_stopped(learner, number):
            with pytest.raises(expected, match=r"coordinator waited 3 s for learner-1: weights 1|learner-1 died"):
                await learner.published(1)


async def test_a_model_that_does_not_load_is_named(ray_local: None, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    settings = replace(config(tmp_path, tmp_path, 1), model=ModelSpec(path=tmp_path / "nothing"))
    with pytest.raises(JobError, match="nothing does not load"):
        await LearnerPool.start(settings)
    assert not ours(tmp_path)


async def test_a_cluster_without_room_is_an_error(ray_local: None, model: Path, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"2 learner rank\(s\) of 500 CPU each could not be.*lower learner\.ranks"):
        await LearnerPool.start(config(model, tmp_path, 2, learner={"cpus_per_rank": 500, "start_deadline_s": 1}))
    assert not ours(tmp_path)


async def test_a_cancelled_start_leaves_no_process(ray_local: None, model: Path, tmp_path: Path) -> None:
    starting = asyncio.create_task(LearnerPool.start(config(model, tmp_path, 2)))
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
