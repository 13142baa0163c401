"""Checkpoints of a run: the learner waits while one is begun, and takes its next steps while it is stored."""

import asyncio
from typing import Any

from services.coordinator.records import Hooks, ReadyGroup
from services.coordinator.watchdog import Waits


class Saving:
    """Stores at most one checkpoint at a time.

    Attributes:
        version: of the last checkpoint, stored or not; None before the first.
    """

    def __init__(self, waits: Waits, version: int | None) -> None:
        self._waits = waits
        self.version = version
        self._task: asyncio.Task[None] | None = None

    async def begin(
        self, tasks: asyncio.TaskGroup, hooks: Hooks, version: int, state: dict[str, Any], ready: list[ReadyGroup]
    ) -> None:
        """Begin the checkpoint of ``version`` once the one before is stored."""
        await self.wait()
        self.version = version
        with self._waits.record("learner", lambda: f"the checkpoint of step {version}"):
            await hooks.begin_checkpoint(version, state, ready)
        self._task = tasks.create_task(hooks.checkpoint_stored(), name=f"checkpoint {version}")

    async def wait(self) -> None:
        """Wait until the last checkpoint is stored."""
        if self._task is not None:
            with self._waits.record("learner", lambda: f"the checkpoint of step {self.version} to be stored"):
                await self._task
