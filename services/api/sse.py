"""Server-sent events: the format, and a response that notices when its client has left or stopped reading."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.tasks import cancel_all

SEND_SECONDS = 30.0  # a client that reads nothing for this long is disconnected
PING = b": ping\n\n"


def one_line(tree: object) -> str:
    """Return ``tree`` as JSON on one line; NaN and infinities, which JSON lacks, become null."""
    return to_json(tree, inf_nan_mode="null").decode()


def message(kind: str, data: str, event_id: str | None = None) -> bytes:
    """Format one event; ``data`` must be a single line."""
    ident = "" if event_id is None else f"id: {event_id}\n"
    return f"event: {kind}\n{ident}data: {data}\n\n".encode()


class EventStream(Response):
    """Sends what ``events`` yields until it ends, the client disconnects, or ``end`` returns."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._end = events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        tasks = [asyncio.ensure_future(each) for each in (self._send_all(send), _left(receive), self._end())]
        sending, leaving, _ = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(tasks)
            await self._events.aclose()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, TimeoutError, OSError):
                task.result()
        if sending.cancelled() and leaving.cancelled():
            with contextlib.suppress(TimeoutError, OSError):
                await _send(send, b"", more=False)

    async def _send_all(self, send: Send) -> None:
        async for data in self._events:
            await _send(send, data, more=True)
        await _send(send, b"", more=False)


async def _send(send: Send, data: bytes, *, more: bool) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
