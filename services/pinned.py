"""In-run evaluation: the actors keep the version that is evaluated, and the learner goes on meanwhile.

train     ... v ──> learn v+1 ──> learn v+2 ... as far as the slots' groups reach ──┐
evaluate  v: prompts ─> actors, shared with the run's own groups ─> figures          │
broadcast       waits until the figures are there ──> v+1 ───────────────────────────┘
"""

import asyncio
from collections.abc import Awaitable, Callable

from volley.job import InRunEvaluation


class PinnedEvaluation:
    """At most one evaluation at a time. Owned by one event loop.

    Args:
        plan: when; None is never.
        steps: of the run.
        evaluate: called with the version that all actors serve and keep.
        over: called after each.

    Attributes:
        version: that is evaluated now, None between evaluations.
    """

    def __init__(
        self,
        plan: InRunEvaluation | None,
        steps: int,
        evaluate: Callable[[int], Awaitable[None]],
        over: Callable[[], Awaitable[None]],
    ) -> None:
        self._plan, self._steps, self._evaluate, self._over = plan, steps, evaluate, over
        self._task: asyncio.Task[None] | None = None
        self.version: int | None = None

    def due(self, version: int) -> bool:
        """Is ``version`` to be evaluated?"""
        if self._plan is None:
            return False
        if version == 0:
            return self._plan.at_start
        return version == self._steps or (self._plan.every is not None and version % self._plan.every == 0)

    def begin(self, tasks: asyncio.TaskGroup, version: int) -> None:
        """The actors serve ``version``, and get no other one before `finished` returns."""
        self.version = version
        self._task = tasks.create_task(self._run(version), name=f"evaluation of version {version}")

    async def finished(self) -> None:
        """Wait until no evaluation is under way."""
        if self._task is not None:
            await self._task

    async def _run(self, version: int) -> None:
        await self._evaluate(version)
        self.version = None
        await self._over()
