"""The environment worker: a Ray actor that runs the episodes of many groups at once."""

import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.outside.programs import OutsidePrograms, start_programs
from environments.programs import Programs
from environments.records import EpisodesDone, Stuck
from environments.room import Room
from environments.session_end import end_session
from volley.processes import redirect_output
from volley.rollout import EnvironmentWorkersSpec, Rollout, ToolsRollout

if TYPE_CHECKING:
    from environments.tools.loop import ToolLoop


class EnvironmentWorker:
    """Runs programs. Its own methods stay responsive whatever these do, since they run in other threads."""

    def __init__(
        self, rollout: Rollout, log_path: Path, import_path: Sequence[str], spec: EnvironmentWorkersSpec
    ) -> None:
        redirect_output(log_path)
        faulthandler.enable()
        sys.path += [path for path in import_path if path and path not in sys.path]
        self._rollout, self._spec = rollout, spec
        self._programs: Programs | OutsidePrograms | None = None
        self._room: Room | None = None
        self._tools: ToolLoop | None = None

    async def ready(self) -> int:
        """Import the program, or start the tools; returns the process id.

        Raises:
            JobError: the program cannot be imported or called, or a function cannot become a tool.
            HostError: this host cannot isolate the model's code.
            WorkerDied: the program's class or its method ``setup`` raised.
        """
        self._programs = await self._load()
        self._room = Room(self._programs, self._spec.episodes, self._rollout.timeout_s, end_session)
        return os.getpid()

    async def close(self) -> None:
        """Let the program's class release what it holds. The process is ended afterwards."""
        if self._programs is not None:
            await self._programs.close()

    async def _load(self) -> Programs | OutsidePrograms:
        if not isinstance(self._rollout, ToolsRollout):
            return await start_programs(self._rollout, self._rollout.timeout_s, self._spec)
        from environments.tools.loop import open_loop  # programs need neither the sandbox nor httpx

        self._tools = await asyncio.to_thread(open_loop, self._rollout)
        return Programs(self._tools.solve, self._rollout.timeout_s, owner=self._tools)

    async def left(self) -> dict[int, int]:
        """How many episodes have not ended of each group that is here, by the group's number."""
        return self._room.left() if self._room is not None else {}

    async def run(self, number: int, row: Mapping[str, Any], base_url: str, keys: Sequence[str]) -> EpisodesDone:
        """Run one episode per key, each as soon as there is room; ``number`` is the group's."""
        if self._room is None:
            raise RuntimeError("the worker is not ready")
        begun = time.perf_counter()
        try:
            ended = await self._room.run(number, row, base_url, keys)
        finally:  # also if the group is cancelled
            errors = [None if self._tools is None else self._tools.take_errors(key) for key in keys]
        tools: Stuck = "thread" if self._tools is not None and self._tools.stuck() else ""
        stuck = max((tools, *(each.stuck for each in ended)), key=("", "thread", "loop").index)
        outcomes = tuple(replace(each.outcome, tool_errors=count) for each, count in zip(ended, errors, strict=True))
        return EpisodesDone(outcomes, time.perf_counter() - begun, stuck, left=self._room.left())
