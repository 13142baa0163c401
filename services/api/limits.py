"""Limits per client: the rate of requests, and the size, duration and shape of bodies."""

import asyncio
import re
import time
from collections import OrderedDict

from starlette.types import Message, Receive

from reward_servers.http_body import BadBody, parse_json
from services.api.problems import Problem

LENGTH_DIGITS = 18  # of a declared length; Python reads no number of thousands of digits
CLIENTS = 10_000  # number of clients whose buckets are remembered
_SURROGATE_OR_NUL = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")
_PARSED_INLINE = 64 << 10  # larger bodies are parsed in a thread


class RateLimiter:
    """One token bucket per client.

    Args:
        rate: requests per second.
        burst: requests that may arrive at once.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and when

    def wait(self, client: str, now: float | None = None) -> float:
        """Count one request of ``client``. Returns 0, or the seconds until the client may send its next one."""
        now = time.monotonic() if now is None else now
        left, then = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._rate)
        wait = 0.0 if left >= 1 else (1 - left) / self._rate
        self._buckets[client] = (left if wait else left - 1, now)
        if len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        return wait


async def read_body(receive: Receive, declared: bytes | None, most: int, seconds: float) -> bytes:
    """Read the whole body, chunked or not. Raises `Problem` 413 if it is too large, 408 too slow, 400 cut off."""
    if declared is not None and not (declared.isdigit() and len(declared) <= LENGTH_DIGITS and int(declared) <= most):
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Problem(400, "cut-off", "the client disconnected")
                body += message.get("body", b"")
                if len(body) > most:
                    raise _too_large(most)
                more = message.get("more_body", False)
    except TimeoutError:
        close = {"Connection": "close"}
        raise Problem(408, "too-slow", f"the body did not arrive within {seconds:g} s", headers=close) from None
    return bytes(body)


async def check_json(body: bytes, content_type: bytes) -> None:
    """Raise `Problem` 400 or 415 unless ``body`` is JSON of bounded depth without duplicate keys or broken Unicode."""
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise Problem(415, "not-json", "send JSON, and Content-Type: application/json")
    try:
        tree = parse_json(body) if len(body) < _PARSED_INLINE else await asyncio.to_thread(parse_json, body)
    except BadBody as error:
        raise Problem(error.status, "bad-json", error.problem) from error
    if _SURROGATE_OR_NUL.search(body) and not _storable(tree):
        raise Problem(400, "bad-json", "a string contains half a surrogate pair or U+0000")


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first returns ``body``, which has already been read."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def bounded(receive: Receive, most: int) -> Receive:
    """Return a ``receive`` for requests without a body; it disconnects a client that sends more than ``most`` bytes."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > most else message

    return counted


def _storable(tree: object) -> bool:
    if isinstance(tree, dict):
        return all(_storable(key) and _storable(value) for key, value in tree.items())
    if isinstance(tree, list):
        return all(map(_storable, tree))
    return not isinstance(tree, str) or ("\0" not in tree and not any("\ud800" <= c <= "\udfff" for c in tree))


def _too_large(most: int) -> Problem:
    return Problem(413, "too-large", f"the body is larger than {most} bytes")
