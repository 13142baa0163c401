"""In-run evaluation: the actors keep the version that is evaluated, while the learner continues.

train     ... v ──> learn v+1 ──> learn v+2 ... until no slot is left ───┐
evaluate  v: prompts ─> actors, shared with the run's own groups ─> row  │
broadcast       waits for the evaluation ──> v+1 ────────────────────────┘

Training continues for at most two steps, one with ``max_lag: 0`` and none if learner and actors share devices.
"""

import asyncio
from collections.abc import Awaitable, Callable

from services.tasks import cancel_all


class PinnedEvaluation:
    """Runs at most one evaluation at a time, on one event loop.

    Args:
        evaluate: called with the version to evaluate, which all actors serve until it returns.
        on_end: called after each evaluation.
        stopping: whether the run is to stop; then no evaluation begins.

    Attributes:
        version: the version being evaluated, or None.
        owed: whether an evaluation is missing: the run must begin with one, or one was cancelled or did not begin.
    """

    def __init__(
        self,
        evaluate: Callable[[int], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
        *,
        stopping: Callable[[], bool],
        owed: bool,
    ) -> None:
        self._evaluate, self._on_end, self._stopping = evaluate, on_end, stopping
        self._task: asyncio.Task[None] | None = None
        self.version: int | None = None
        self.owed = owed

    def begin(self, tasks: asyncio.TaskGroup, version: int) -> None:
        """Start the evaluation of ``version``, which the actors must serve until `wait` returns."""
        self.owed = self._stopping()
        if self.owed:
            return
        self.version = version
        self._task = tasks.create_task(self._run(version), name=f"evaluation of version {version}")

    async def wait(self) -> None:
        """Return when no evaluation is under way; raise what the last one raised."""
        if self._task is not None:
            await asyncio.wait((self._task,))
            if not self._task.cancelled():
                self._task.result()

    async def cancel(self) -> None:
        """Cancel the evaluation under way. It is then owed: the run makes one of the version it has when it goes on."""
        if self._task is not None and not self._task.done():
            self.owed = self.version is not None  # None: it is made, and `on_end` is under way
            await cancel_all((self._task,))
            self.version = None
            await self._on_end()

    async def _run(self, version: int) -> None:
        await self._evaluate(version)
        self.version = None
        await self._on_end()
