"""Reads request bodies from untrusted clients, with checks of size, time, encoding, depth and duplicate keys."""

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

MAX_BODY = 16 << 20
MAX_DEPTH = 32
BODY_DEADLINE_S = 20.0
_OPEN = frozenset(b"[{")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class BadBody(Exception):
    """The request body is rejected.

    Args:
        status: HTTP status of the response.
        problem: one line for the client.
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status, self.problem = status, problem


async def read_json(request: Request, *, max_body: int = MAX_BODY, deadline_s: float = BODY_DEADLINE_S) -> Any:
    """Return the parsed body. Raises BadBody: 408 if it is too slow, 413 if too large, 400 if not valid JSON."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > max_body:
        raise BadBody(413, f"the body is larger than {max_body >> 20} MB")
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_body:
                    raise BadBody(413, f"the body is larger than {max_body >> 20} MB")
    except TimeoutError:
        raise BadBody(408, f"the body did not arrive within {deadline_s:g} s") from None
    except ClientDisconnect:
        raise BadBody(400, "the client disconnected") from None
    return await asyncio.to_thread(parse_json, bytes(body))


def parse_json(body: bytes) -> Any:
    """Parse strict JSON: UTF-8, at most ``MAX_DEPTH`` deep, no duplicate keys, no NaN. Raises BadBody (400)."""
    try:
        text = body.decode("utf-8")
        if _depth(body) > MAX_DEPTH:
            raise BadBody(400, f"the JSON is nested deeper than {MAX_DEPTH}")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise BadBody(400, "the body is not UTF-8") from None
    except ValueError as problem:
        raise BadBody(400, f"the body is not JSON: {problem}") from problem


def _depth(body: bytes) -> int:
    """Return the deepest nesting of brackets outside strings; stops counting beyond ``MAX_DEPTH``."""
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    depth = deepest = 0
    for byte in b"".join(pieces[::2]).translate(None, delete=_NO_BRACKET):
        depth += 1 if byte in _OPEN else -1
        deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            break
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")
