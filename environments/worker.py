"""The environment worker: a Ray actor that runs the episodes of many groups at once."""

import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.programs import Programs, load_program, timed
from environments.records import EpisodesDone
from volley.processes import redirect_output
from volley.rollout import ProgramRollout


class EnvironmentWorker:
    """Runs programs. Its own methods stay responsive whatever these do, since they run in other threads."""

    def __init__(self, rollout: ProgramRollout, log_path: Path, import_path: Sequence[str]) -> None:
        redirect_output(log_path)
        faulthandler.enable()
        sys.path += [path for path in import_path if path and path not in sys.path]
        self._rollout = rollout
        self._programs: Programs | None = None

    async def ready(self) -> int:
        """Import the program; returns the process id.

        Raises:
            JobError: the program cannot be imported or called.
            WorkerDied: its class or the method ``setup`` raised.
        """
        program = await asyncio.to_thread(load_program, self._rollout.target)
        self._programs = Programs(program, self._rollout.timeout_s)
        await self._programs.set_up()
        return os.getpid()

    async def close(self) -> None:
        """Let the program's class release what it holds. The process is ended afterwards."""
        if self._programs is not None:
            await self._programs.close()

    async def run(self, row: Mapping[str, Any], base_url: str, keys: Sequence[str]) -> EpisodesDone:
        """Run one episode per key, at once."""
        if self._programs is None:
            raise RuntimeError("the worker is not ready")
        begun = time.perf_counter()
        ended = await asyncio.gather(*(timed(self._programs.run(row, base_url, key)) for key in keys))
        stuck = max((each.stuck for each in ended), key=("", "thread", "loop").index)
        return EpisodesDone(tuple(each.outcome for each in ended), time.perf_counter() - begun, stuck)
