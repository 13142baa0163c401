"""One sink's process, and the queue of rows that wait for it."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from services.recording.sinks.base import SinkRow

log = logging.getLogger(__name__)

BATCH = 100  # rows per message
MAX_WAITING = 10_000  # rows; beyond it the oldest are dropped here, but the run folder has them
START_SECONDS = 120.0  # for imports and a server's first answer
ANSWER_SECONDS = 60.0
FIRST_DELAY, LONGEST_DELAY = 5.0, 300.0  # before a sink that failed is tried again

Report = Callable[[str], Awaitable[None]]


class SinkFailed(Exception):
    """The sink's process reported a problem, or ended without a report."""


class SinkProcess:
    """Queues rows without waiting, and sends them to the sink's process one batch at a time. Runs on one event loop.

    Args:
        name: the sink's name, such as ``wandb``.
        opening: the first message to the process; see `services.recording.sinks.child`.
        log_file: receives what the process prints.
        report: awaited once, with the first problem.

    Attributes:
        lost: rows that were dropped from a full queue or never delivered.
    """

    def __init__(self, name: str, opening: Mapping[str, Any], log_file: Path, report: Report) -> None:
        self.name, self.lost = name, 0
        self._opening, self._log, self._report = opening, log_file, report
        self._waiting: deque[SinkRow | int] = deque()  # rows, and steps to rewind to
        self._step = 0  # the first step that the sink lacks
        self._wake = asyncio.Event()
        self._end = ""
        self._reported = False
        self._task: asyncio.Task[None] | None = None

    def put(self, row: SinkRow) -> None:
        """Queue a row."""
        self._add(row)

    def rewind(self, step: int) -> None:
        """Tell the sink that rows of ``step`` and later steps will be sent again."""
        if self._task is None:
            self._step = step
        else:
            self._add(step)

    def _add(self, message: SinkRow | int) -> None:
        self._waiting.append(message)
        if len(self._waiting) > MAX_WAITING:
            self.lost += isinstance(self._waiting.popleft(), SinkRow)
        if self._task is None:
            self._task = asyncio.create_task(self._run_processes(), name=f"sink {self.name}")
        self._wake.set()

    async def close(self, end: str, seconds: float) -> None:
        """Send the waiting rows, close the sink and end its process, all within ``seconds``."""
        if self._task is None:
            return
        self._end = end
        self._wake.set()
        try:
            async with asyncio.timeout(seconds):
                await self._task
        except TimeoutError:
            await self._trouble(f"it did not take the last rows within {seconds:g} s")
        self.lost += sum(isinstance(each, SinkRow) for each in self._waiting)

    async def _run_processes(self) -> None:
        """Run the sink's process, and start another one after a failure, until the run ends; then try once more."""
        delay = FIRST_DELAY
        while True:
            last_try = bool(self._end)
            try:
                await self._run_process()
                return
            except (SinkFailed, OSError, ValueError, TimeoutError) as error:
                await self._trouble(str(error) or f"it did not answer within {ANSWER_SECONDS:g} s")
            if last_try:
                return
            await self._until_end(delay)
            delay = min(LONGEST_DELAY, 2 * delay)

    async def _until_end(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the run ends; rows that arrive meanwhile stay in the queue."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._end:
                    self._wake.clear()
                    await self._wake.wait()

    async def _trouble(self, problem: str) -> None:
        log.warning("sink %s: %s; log: %s", self.name, problem, self._log)
        if not self._reported:
            self._reported = True
            await self._report(f"sink {self.name}: {problem}. The run continues without it; log: {self._log.name}")

    async def _run_process(self) -> None:
        """Run one process from its start to the end of the run."""
        process = await self._start()
        try:
            run = {**self._opening["run"], "step": self._step}
            await _ask(process, {**self._opening, "run": run}, START_SECONDS)
            while True:
                while self._waiting:
                    await self._send(process)
                if self._end:
                    await _ask(process, {"end": self._end}, ANSWER_SECONDS)
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await process.wait()
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            await _kill(process)

    async def _start(self) -> asyncio.subprocess.Process:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.recording.sinks.child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=out,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # keeps Ctrl-C away, and lets one signal kill it with all that it started
            )

    async def _send(self, process: asyncio.subprocess.Process) -> None:
        first = self._waiting[0]
        if isinstance(first, int):
            await _ask(process, {"rewind": first}, ANSWER_SECONDS)
            self._delivered(first, first)
            return
        rows = [each for each in takewhile(_is_row, islice(self._waiting, BATCH)) if isinstance(each, SinkRow)]
        await _ask(process, {"rows": [asdict(row) for row in rows]}, ANSWER_SECONDS)
        for row in rows:
            self._delivered(row, row.number + 1 if row.kind == "step" else self._step)

    def _delivered(self, message: SinkRow | int, step: int) -> None:
        """Note that the sink has ``message`` and now lacks ``step``. The queue may have dropped it meanwhile."""
        self._step = step
        if self._waiting and self._waiting[0] is message:
            self._waiting.popleft()


def _is_row(message: SinkRow | int) -> bool:
    return isinstance(message, SinkRow)


async def _ask(process: asyncio.subprocess.Process, message: Mapping[str, Any], seconds: float) -> None:
    """Send ``message`` and wait for the answer; raises `SinkFailed`, OSError or TimeoutError if it was not handled."""
    if process.stdin is None or process.stdout is None:
        raise SinkFailed("its process has no pipes")
    async with asyncio.timeout(seconds):
        with contextlib.suppress(ConnectionError):  # the process has ended, and the line it wrote before says why
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
    if not line:
        raise SinkFailed("its process ended without an error message")
    if problem := json.loads(line).get("problem"):
        raise SinkFailed(problem)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and all that it started."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
