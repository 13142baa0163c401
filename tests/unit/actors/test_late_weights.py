"""Actors outside of the weight group ask for weights together, and only when these are not in the object store."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from actors.late_weights import LateWeights
from volley.errors import DeadlineExceeded, WeightsGone, WorkerDied
from volley.records import WeightBucket, WeightUpdate

REF: Any = Future()


def delivered(version: int) -> WeightUpdate:
    return WeightUpdate(version, (WeightBucket(None, 4),), None, 0.0, frozenset({"actor-0"}))


def stored(version: int) -> WeightUpdate:
    return WeightUpdate(version, (WeightBucket(REF, 4),), None, 0.0, frozenset({"actor-0"}))


class Learner:
    """Stores at once, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[int] = []
        self.error = error

    async def store(self, version: int) -> WeightUpdate:
        self.asked.append(version)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return stored(version)


async def test_several_actors_cost_one_call_per_update() -> None:
    late, learner = LateWeights(), Learner()
    late.store = learner.store
    update = delivered(3)
    for each in await asyncio.gather(*(late.complete(update) for _ in range(5))):
        assert each == stored(3)
    assert learner.asked == [3]
    again = delivered(3)  # of a learner that restarted: the same version, other weights
    assert (await late.complete(again)).stored
    assert learner.asked == [3, 3]


async def test_what_is_stored_needs_no_learner() -> None:
    update = stored(1)
    assert await LateWeights().complete(update) is update
    with pytest.raises(WeightsGone, match="weights 2 are not in the object store"):
        await LateWeights().complete(delivered(2))


@pytest.mark.parametrize("error", [WorkerDied("learner-0", "killed", ""), DeadlineExceeded("coordinator", "it", 3)])
async def test_weights_of_a_dead_learner_are_gone_and_may_be_asked_for_again(error: Exception) -> None:
    late, dead = LateWeights(), Learner(error)
    late.store, update = dead.store, delivered(4)
    with pytest.raises(WeightsGone, match="weights 4 are gone with their learner"):
        await late.complete(update)
    late.store = Learner().store
    assert (await late.complete(update)).stored
