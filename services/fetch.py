"""Arrays out of Ray's object store, within a bound."""

import asyncio
from typing import Any

from volley.errors import DeadlineExceeded

FETCH_SECONDS = 60.0


async def fetched(reference: Any) -> Any:
    """What an object reference stands for.

    Raises:
        DeadlineExceeded: it did not come.
        ObjectLostError: it went with a node.
    """
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            return await reference
    except TimeoutError:
        raise DeadlineExceeded("driver", "the arrays of a group", FETCH_SECONDS) from None
