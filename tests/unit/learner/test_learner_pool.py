"""The parts of the learner's pool that need no ranks."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from learner.config import LearnerConfig
from learner.pool import LearnerPool, _to_its_end, deal
from learner.rank_actors import RankActors
from volley.errors import WorkerDied
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_work_in_a_thread_ends_before_its_cancellation_is_raised(times: int) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(10)
        ended.set()

    waiting = asyncio.create_task(_to_its_end(asyncio.to_thread(work)))
    for _ in range(times):
        await asyncio.sleep(0.01)
        waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    may_end.set()
    if times:
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        await waiting
    assert ended.is_set()


async def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise OSError("read-only")

    with pytest.raises(OSError, match="read-only"):
        await _to_its_end(asyncio.to_thread(work))


def test_the_ranks_of_a_sequence_group_get_the_same_share(tmp_path: Path) -> None:
    pool = LearnerPool.__new__(LearnerPool)  # without ranks
    spec = LearnerSpec(ranks=4, sequence_parallel=2)
    pool.config = LearnerConfig(ModelSpec(path=tmp_path), spec, Optimizer(), steps=1, seed=0, log_dir=tmp_path)
    costs = [5, 1, 4, 2]
    shares = pool._shares(costs)
    assert shares == [[0, 1], [0, 1], [2, 3], [2, 3]]
    pool.config = replace(pool.config, learner=LearnerSpec(ranks=2))
    assert pool._shares(costs) == deal(costs, 2)


async def test_a_learner_that_was_stopped_stores_nothing(tmp_path: Path) -> None:
    stopped = LearnerPool.__new__(LearnerPool)
    stopped.config = LearnerConfig(ModelSpec(path=tmp_path), LearnerSpec(), Optimizer(), 1, 0, tmp_path)
    stopped._ranks = RankActors.__new__(RankActors)
    stopped._ranks.handles = []
    with pytest.raises(WorkerDied, match="learner-0 died: it was stopped"):
        await stopped.store(3)
