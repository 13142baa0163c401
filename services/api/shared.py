"""A read that requests share, so that none queues behind the retries of the others while Redis or Ray hangs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedRead(Generic[T]):
    """What ``read`` returned last. All who ask while it is under way get its result, or its error.

    Args:
        seconds: how long a result is used before it is read again.

    Attributes:
        value: the newest result; None before the first.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._reading: asyncio.Task[T] | None = None
        self._read_at = float("-inf")
        self.value: T | None = None

    async def get(self) -> T:
        """Return a result that is not older than ``seconds``. Raises what ``read`` raises."""
        if self.value is not None and time.monotonic() - self._read_at < self._seconds:
            return self.value
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._run())
        return await asyncio.shield(self._reading)  # a client that leaves must not fail the others

    def expire(self) -> None:
        """Read again for whoever asks next, even if a read is under way, which may miss what has just changed."""
        self._read_at, self._reading = float("-inf"), None

    async def _run(self) -> T:
        value = await self._read()
        if asyncio.current_task() is self._reading:
            self.value, self._read_at = value, time.monotonic()
        return value
