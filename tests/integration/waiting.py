"""How tests wait for what nothing announces."""

import asyncio
import time
from collections.abc import Callable


async def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Ask every 50 ms; fails if it does not hold within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        await asyncio.sleep(0.05)
