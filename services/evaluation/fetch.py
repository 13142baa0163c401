"""Fetch objects from Ray's object store within a deadline."""

import asyncio
from typing import TypeVar

from volley.errors import DeadlineExceeded
from volley.refs import Ref

FETCH_SECONDS = 60.0
T = TypeVar("T")


async def fetched(reference: Ref[T]) -> T:
    """The object that ``reference`` refers to.

    Raises:
        DeadlineExceeded: it did not arrive within `FETCH_SECONDS`.
        ObjectLostError: the node that held it was lost.
    """
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            return await reference
    except TimeoutError:
        raise DeadlineExceeded("driver", "the arrays of a group", FETCH_SECONDS) from None
