"""A full disk is a pause, not an end: what has to be written waits for room."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from volley.errors import DiskFull

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 3.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class Room:
    """Does what takes disk space, again and again while there is none.

    Args:
        told: awaited once at the beginning of each wait, with the problem, and with nothing at its end.

    Attributes:
        problem: what waits, or nothing.
    """

    def __init__(self, told: Callable[[str], Awaitable[None]]) -> None:
        self.problem = ""
        self._told = told

    async def wait_for(self, write: Callable[[], Awaitable[T]]) -> T:
        """The result of ``write``, which is called until the disk has room; its other errors are raised."""
        waited = False
        while True:
            try:
                result = await write()
            except (DiskFull, OSError) as error:
                if isinstance(error, OSError) and error.errno not in FULL:
                    raise
                if not waited:
                    waited, self.problem = (
                        True,
                        f"the disk is full: {error}. Free some space; the run goes on by itself",
                    )
                    await self._told(self.problem)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                if waited:
                    self.problem = ""
                    await self._told("")
                return result
