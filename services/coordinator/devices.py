"""Who has the devices, with ``placement: colocated``: the actors generate, or the learner trains, never both.

            deliver: learner.sleep, actors.broadcast
    ┌──────────────────────────────────────────────┐
    v                                              │
  actors: generate, evaluate       learner: step, publish, checkpoint, export
    │                                              ^
    └──────────────────────────────────────────────┘
            actors.sleep, learner.wake

Samples under way when the actors fall asleep keep their tokens and go on under the next version. Reward workers,
environment workers and what stores a checkpoint go on meanwhile.

With ``broadcast: {transport: shared_memory}`` `deliver` has a stage between: the learner lends its weights and gives
back all else, the actors load them and sleep on, the learner sleeps, the actors wake up.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actors.config import BroadcastReport
from volley.records import Group, WeightUpdate
from volley.refs import Ref


class Sleeper(Protocol):
    """`actors.pool.ActorPool`, or `learner.pool.LearnerPool`."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Actors(Sleeper, Protocol):
    """`actors.pool.ActorPool`."""

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport: ...


class Learner(Sleeper, Protocol):
    """`learner.pool.LearnerPool`."""

    async def lend(self) -> None: ...

    async def score(self, group: Ref[Group]) -> NDArray[np.float32]: ...


class Devices:
    """Used from the run's event loop only, by one caller at a time. At first the actors have the devices.

    Args:
        shared: whether there is anything to hand over.

    Attributes:
        learner: the learner in use.
    """

    def __init__(self, actors: Actors, learner: Learner, *, shared: bool) -> None:
        self._actors, self.learner, self.shared = actors, learner, shared
        self._learner_has_them = False
        self._seconds = 0.0

    async def to_learner(self) -> None:
        """Let the actors sleep and the learner wake up."""
        if self.shared and not self._learner_has_them:
            with self._timed():
                await self._actors.sleep()
                await self.learner.wake()
            self._learner_has_them = True

    async def deliver(self, update: WeightUpdate) -> BroadcastReport:
        """Let the actors take ``update`` and have the devices. Raises whatever `ActorPool.broadcast` raises."""
        if not update.lent:
            await self._learner_leaves()
            return await self._actors.broadcast(update)
        with self._timed():
            await self.learner.lend()
        report = await self._actors.broadcast(update)
        await self._learner_leaves()
        with self._timed():
            await self._actors.wake()
        return report

    async def _learner_leaves(self) -> None:
        if self._learner_has_them:
            with self._timed():
                await self.learner.sleep()
            self._learner_has_them = False

    async def learner_ended(self) -> None:
        """Let the actors sleep, since another learner starts, awake; set `learner` once it has."""
        if self.shared:
            await self._actors.sleep()
            self._learner_has_them = True

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """Let the learner have the devices during the block; if it fails, whoever repairs the run hands them over."""
        from_actors = not self._learner_has_them
        await self.to_learner()
        yield
        if self.shared and from_actors:
            await self._learner_leaves()
            with self._timed():
                await self._actors.wake()

    async def score(self, group: Ref[Group]) -> NDArray[np.float32]:
        """`LearnerPool.score`, with the devices."""
        async with self.borrowed():
            return await self.learner.score(group)

    def take_metrics(self) -> dict[str, float]:
        """How long handing over took since the last call; actors that woke up with a version not included."""
        seconds, self._seconds = self._seconds, 0.0
        return {"seconds_hand_over": seconds} if self.shared else {}

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - begun
