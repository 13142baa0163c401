"""Programs under an interpreter of their own, in a child process that is killed and replaced.

    OutsidePrograms ── lines of JSON ──> child.py, under `rollout.python` ──> the program
                    <── lines of JSON ──

What comes back is data of an untrusted process: it is read as JSON and checked. A child that dies, sends anything else
or floods its output fails the episodes within it; the next episode starts another. A child whose program cannot be
ended is killed at once if the program blocks its event loop, otherwise when its other episodes have ended.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from environments.outside.interpreter import Outside, outside_of
from environments.outside.process import Child
from environments.programs import Ended, Programs, load_rollout
from environments.records import Outcome
from volley.errors import JobError
from volley.restarts import Restarts
from volley.rollout import EnvironmentWorkersSpec, Rollout


class OutsidePrograms:
    """Runs episodes of one program in a child process.

    Args:
        timeout_s: seconds per episode.
        start_s: seconds for a child to import the program.
        replacements: how many children may be replaced within an hour.
    """

    def __init__(self, outside: Outside, timeout_s: float, start_s: float, replacements: int) -> None:
        self._outside, self._timeout, self._start_s = outside, timeout_s, start_s
        self._restarts = Restarts(replacements)
        self._child: Child | None = None
        self._starting: asyncio.Task[Child] | None = None
        self._failure = ""

    async def start(self) -> None:
        """Start the first child. Raises `JobError`, as `check_outside`."""
        self._child = await Child.start(self._outside, self._start_s)

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Ended:
        """Run one episode. Never raises because of the program.

        Raises:
            JobError: its process died too often.
        """
        begun = time.monotonic()
        try:
            running = await self._usable()
        except TimeoutError:
            return Ended(
                Outcome(failure=f"the program's process did not start within {self._timeout:g} s", kind="timeout")
            )
        except _DidNotStart as problem:
            return Ended(Outcome(failure=str(problem)))
        left = self._timeout - (time.monotonic() - begun)
        outcome = await running.run({"row": dict(row), "base_url": base_url, "api_key": api_key}, left)
        late = f"the program took longer than rollout.timeout_s, {self._timeout:g} s"
        return Ended(outcome or Outcome(failure=late, kind="timeout"))

    async def close(self) -> None:
        """End the child, and the episodes in it."""
        if self._child is not None:
            await self._child.stop()

    async def _usable(self) -> Child:
        """A child that takes episodes. Raises `JobError` after too many, `_DidNotStart` or `TimeoutError`."""
        if self._child is not None and self._child.usable:
            return self._child
        starting = self._replacement()
        async with asyncio.timeout(self._timeout):
            try:
                return await asyncio.shield(starting)
            except JobError as problem:
                raise _DidNotStart(str(problem)) from None

    def _replacement(self) -> "asyncio.Task[Child]":
        """The start of the next child, one for all episodes that wait for it."""
        if self._starting is not None:
            return self._starting
        if not self._restarts.allow():
            raise JobError(
                f"the program's process had to be replaced more than {self._restarts.most} times within an hour, the "
                f"limit that environment_workers.max_replacements sets; the last one ended: {self._why}"
            )
        self._starting = asyncio.create_task(Child.start(self._outside, self._start_s))
        self._starting.add_done_callback(self._started)
        return self._starting

    @property
    def _why(self) -> str:
        return self._failure or (self._child.ended if self._child is not None else "")

    def _started(self, starting: "asyncio.Task[Child]") -> None:
        self._starting = None
        if starting.cancelled():
            return
        problem = starting.exception()
        self._failure = "" if problem is None else str(problem)
        if problem is None:
            self._child = starting.result()


async def start_programs(
    rollout: Rollout, timeout_s: float, spec: EnvironmentWorkersSpec
) -> Programs | OutsidePrograms:
    """Import the job's program, and set it up, under the interpreter that the job names.

    Args:
        timeout_s: seconds per episode.

    Raises:
        JobError: the program cannot be imported or called.
        WorkerDied: its class or the method ``setup`` raised.
    """
    if (outside := outside_of(rollout)) is not None:
        apart = OutsidePrograms(outside, timeout_s, spec.start_deadline_s, spec.max_replacements)
        await apart.start()
        return apart
    programs = Programs(await asyncio.to_thread(load_rollout, rollout), timeout_s)
    await programs.set_up()
    return programs


class _DidNotStart(Exception):
    """This time; the next episode tries again."""
