"""In-run evaluation: the actors keep the version that is evaluated, and the learner goes on meanwhile.

train     ... v ──> learn v+1 ──> learn v+2 ... as far as the slots' groups reach ──┐
evaluate  v: prompts ─> actors, shared with the run's own groups ─> figures          │
broadcast       waits until the figures are there ──> v+1 ───────────────────────────┘
"""

import asyncio
from collections.abc import Awaitable, Callable

from services.start import cancel_all


class PinnedEvaluation:
    """At most one evaluation at a time. Owned by one event loop.

    Args:
        evaluate: called with the version that all actors serve and keep.
        over: called after each.
        stopping: is the run to stop? Then no evaluation begins.
        owes: a resumed run begins with one.

    Attributes:
        version: that is evaluated now, None between evaluations.
        owed: the run begins with one, or one was given up.
    """

    def __init__(
        self,
        evaluate: Callable[[int], Awaitable[None]],
        over: Callable[[], Awaitable[None]],
        *,
        stopping: Callable[[], bool],
        owes: bool,
    ) -> None:
        self._evaluate, self._over, self._stopping = evaluate, over, stopping
        self._task: asyncio.Task[None] | None = None
        self.version: int | None = None
        self.owed = owes

    def begin(self, tasks: asyncio.TaskGroup, version: int) -> None:
        """The actors serve ``version``, and get no other one before `finished` returns."""
        self.owed = self._stopping()
        if self.owed:
            return
        self.version = version
        self._task = tasks.create_task(self._run(version), name=f"evaluation of version {version}")

    async def finished(self) -> None:
        """Wait until no evaluation is under way."""
        if self._task is not None:
            await asyncio.wait((self._task,))
            if not self._task.cancelled():
                self._task.result()

    async def give_up(self) -> None:
        """End the evaluation under way: a resumed run makes one, of the version it goes on from."""
        if self._task is not None and not self._task.done():
            self.owed = True
            await cancel_all((self._task,))
            self.version = None
            await self._over()

    async def _run(self, version: int) -> None:
        await self._evaluate(version)
        self.version = None
        await self._over()
