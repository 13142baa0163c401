"""Which weights an actor is given: those that the learner lends, or, on another node, those in the object store."""

import asyncio
from concurrent.futures import Future
from typing import Any

from actors.config import ActorUpdate
from actors.handle import ActorHandle
from actors.late_weights import LateWeights
from volley.errors import WeightsGone
from volley.records import WeightBucket, WeightUpdate

REF: Any = Future()
LENT = WeightUpdate(3, (WeightBucket(None, 8, "file"),), None, 0.0, lender="here")


class Handle(ActorHandle):
    """An actor on ``node``; there is no process."""

    def __init__(self, node: str) -> None:
        self.name, self.node, self.idle = "actor-0", node, asyncio.Event()
        self.samples = self._calls = 0
        self.given: list[WeightUpdate] = []
        self._late_weights = LateWeights()
        self._late_weights.store = self.store

    async def store(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, (WeightBucket(REF, 8),), None, 0.0)

    async def _updated(self, update: WeightUpdate) -> ActorUpdate:
        self.given.append(update)
        if update.lent and update.lender != self.node:
            raise WeightsGone("on another node")
        return ActorUpdate(self.name, update.version, update.nbytes, 0.0, 0.0, 0.0)


async def test_an_actor_on_the_learners_node_reads_what_it_lends() -> None:
    actor = Handle("here")
    await actor.update(LENT)
    assert actor.given == [LENT]


async def test_an_actor_on_another_node_gets_it_from_the_object_store() -> None:
    actor = Handle("there")
    await actor.update(LENT)
    assert [update.lent for update in actor.given] == [True, False]
    assert actor.given[-1].stored


async def test_what_is_no_longer_lent_comes_from_the_object_store() -> None:
    actor = Handle("here")
    await actor.update(LENT.taken_back())
    assert [(update.lent, update.stored) for update in actor.given] == [(False, True)]
