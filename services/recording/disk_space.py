"""A full disk pauses a run and does not end it: writes are repeated until there is space."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from volley.errors import DiskFull
from volley.files import is_full

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 3.0


class DiskGuard:
    """Repeats writes that fail because the disk is full.

    Args:
        report: awaited once when a wait for space begins, with the problem, and once when it ends, with "".

    Attributes:
        problem: why the run waits for space, or "".
    """

    def __init__(self, report: Callable[[str], Awaitable[None]]) -> None:
        self.problem = ""
        self._report = report
        self._waiting = 0  # writes

    async def retry_while_full(self, write: Callable[[], Awaitable[T]]) -> T:
        """Call ``write`` until the disk is not full, and return its result. Other errors are raised."""
        waits = False
        try:
            while True:
                try:
                    result = await write()
                except (DiskFull, OSError) as error:
                    if isinstance(error, OSError) and not is_full(error):
                        raise
                    if not waits:
                        waits, self._waiting = True, self._waiting + 1
                        await self._begin_wait(error)
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    break
        finally:  # a write that was cancelled or failed waits no longer
            self._waiting -= waits
            ended = waits and not self._waiting
            if ended:
                self.problem = ""
        if ended:
            await self._report("")
        return result

    async def write(self, write: Callable[[], T]) -> T:
        """`retry_while_full` for a function that blocks."""

        async def writing() -> T:
            return write()

        return await self.retry_while_full(writing)

    async def _begin_wait(self, error: Exception) -> None:
        if self._waiting == 1:
            self.problem = f"the disk is full: {error}. Free some space and the run continues"
            await self._report(self.problem)
