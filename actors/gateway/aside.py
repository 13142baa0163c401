"""Work that grows with a request, done in threads where it would hold up the event loop, and with it the engine.

Tokenizers of the `tokenizers` library let other threads run while they encode, and may encode and decode in several
threads at once. Python code in a thread lets the event loop have its turn every few milliseconds.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES = 64 << 10  # of a request; what takes a few milliseconds is not worth a thread
_THREADS = ThreadPoolExecutor(8, thread_name_prefix="gateway")
T = TypeVar("T")


async def aside(size: int, work: Callable[..., T], *arguments: object) -> T:
    """The result of ``work(*arguments)``, done in a thread if the request has more than `INLINE_BYTES` bytes.

    If the caller is cancelled, the thread goes on, so ``work`` must change nothing that others use.
    """
    if size <= INLINE_BYTES:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)
