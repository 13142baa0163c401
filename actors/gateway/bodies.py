"""The bodies of requests: how large they may be, how long they may take to arrive, and what JSON they may hold."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.requests import Request

from actors.gateway.aside import aside
from actors.gateway.asked import BadRequest
from actors.gateway.json_values import parse_json

BODY_SECONDS = 60.0
BASE_BYTES, BYTES_PER_TOKEN, MOST_BYTES = 8 << 20, 128, 64 << 20
_PIECE_SECONDS = 1.0


class Body(NamedTuple):
    """A request's JSON object, and its size in bytes as it came."""

    fields: Mapping[str, Any]
    size: int


class TooLarge(Exception):
    """A body that is larger than requests may be."""


def most_bytes(context: int) -> int:
    """The largest body of a request whose prompt and answer have at most ``context`` tokens.

    Parsing holds up all other requests. A token is seldom more than a word, and JSON repeats at most parts of a text.
    """
    return min(MOST_BYTES, BASE_BYTES + context * BYTES_PER_TOKEN)


async def read_body(request: Request, context: int) -> Body:
    """The body of a request, for a model or session with ``context`` tokens.

    Raises:
        BadRequest: it does not arrive, or is not a JSON object.
        TooLarge: it is larger than `most_bytes`.
    """
    content = await _content(request, most_bytes(context))
    fields = await aside(len(content), _parsed, content)
    return Body(fields, len(content))


def _parsed(content: bytes) -> Mapping[str, Any]:
    try:
        fields = parse_json(content.decode())
    except ValueError as problem:
        raise BadRequest(f"the body is not usable JSON: {problem}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return fields


async def _content(request: Request, most: int) -> bytes:
    content, left = bytearray(), BODY_SECONDS
    while left > 0:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(_PIECE_SECONDS):
                message = await request.receive()
        except TimeoutError:
            left -= _PIECE_SECONDS  # however late the server noticed: the time in which it did not read is its own
            continue
        left -= min(_PIECE_SECONDS, time.monotonic() - begun)
        if message["type"] == "http.disconnect":
            raise BadRequest("the client closed its connection before the body was complete")
        content += message.get("body", b"")
        if len(content) > most:
            raise TooLarge(f"the body is larger than {most >> 20} MiB: send less text")
        if not message.get("more_body", False):
            return bytes(content)
    raise BadRequest(f"the body did not arrive within {BODY_SECONDS:g} s")
