"""Weights for actors that neither the weight group nor a loan reached: the learner puts them into the object store."""

import asyncio
from collections.abc import Awaitable, Callable

from volley.errors import DeadlineExceeded, WeightsGone, WorkerDied
from volley.records import WeightUpdate


class LateWeights:
    """Asks the learner once per update, however many actors need it.

    Attributes:
        store: `learner.pool.LearnerPool.store` of the present learner; None before it starts, and while it is replaced.
    """

    def __init__(self) -> None:
        self.store: Callable[[int], Awaitable[WeightUpdate]] | None = None
        self._asked: WeightUpdate | None = None
        self._stored: WeightUpdate | None = None
        self._asking = asyncio.Lock()

    def forget(self) -> None:
        """Let the object store drop the last answer: a newer version is there."""
        self._asked = self._stored = None

    async def complete(self, update: WeightUpdate) -> WeightUpdate:
        """``update`` with all its weights in the object store.

        Raises:
            WeightsGone: the learner died or hangs, or has published newer weights since.
        """
        if update.stored:
            return update
        async with self._asking:
            if self._stored is None or self._asked is not update:
                self._asked, self._stored = update, await self._ask(update.version)
            stored: WeightUpdate = self._stored
            return stored

    async def _ask(self, version: int) -> WeightUpdate:
        if self.store is None:
            raise WeightsGone(f"weights {version} are not in the object store")
        try:
            return await self.store(version)
        except (WorkerDied, DeadlineExceeded) as error:
            raise WeightsGone(f"weights {version} are gone with their learner: {error}") from error
