"""Rate limits and request bodies, tested without a socket."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.api import limits
from services.api.limits import RateLimiter, bounded, check_json, read_body, replayed
from services.api.problems import Problem

Receive = Callable[[], Awaitable[Any]]


def receiving(*pieces: bytes, end: bool = True) -> Receive:
    waiting = list(pieces)

    async def receive() -> Any:
        if not waiting:
            return {"type": "http.disconnect"}
        piece = waiting.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(waiting) or not end}

    return receive


def test_the_limiter_allows_a_burst_and_then_the_rate() -> None:
    limiter = RateLimiter(10, 5)
    taken = sum(limiter.wait("a", now=i * 0.001) == 0 for i in range(1000))
    assert taken in (14, 15), "five immediately, and ten over the second"
    assert limiter.wait("b", now=1.0) == 0, "other clients are not affected"
    assert limiter.wait("a", now=100.0) == 0
    waits = [limiter.wait("c", now=5.0) for _ in range(6)]
    assert waits[:5] == [0.0] * 5
    assert waits[5] == pytest.approx(0.1)


def test_the_oldest_clients_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLIENTS", 3)
    limiter = RateLimiter(1, 1)
    for client in "abcd":
        assert limiter.wait(client, now=0.0) == 0
    assert limiter.wait("d", now=0.0) > 0
    assert limiter.wait("a", now=0.0) == 0


async def test_a_body_in_pieces_is_joined() -> None:
    assert await read_body(receiving(b"ab", b"", b"cd"), None, 4, 1) == b"abcd"
    assert await read_body(receiving(b""), b"0", 4, 1) == b""


@pytest.mark.parametrize(
    ("receive", "declared", "status"),
    [
        (receiving(b"ab", b"cd", b"e"), None, 413),
        (receiving(b"x"), b"5", 413),
        (receiving(b"x"), b"-1", 413),
        (receiving(b"x"), b"1e3", 413),
        (receiving(b"x"), b"1" * 5000, 413),
        (receiving(b"ab", end=False), None, 400),
        (lambda: asyncio.sleep(60), None, 408),
    ],
)
async def test_invalid_bodies_are_rejected(receive: Receive, declared: bytes | None, status: int) -> None:
    with pytest.raises(Problem) as caught:
        await read_body(receive, declared, 4, 0.05)
    assert caught.value.status == status


async def test_a_body_is_replayed_and_then_receiving_continues() -> None:
    receive = replayed(b"abc", receiving())
    assert (await receive())["body"] == b"abc"
    assert (await receive())["type"] == "http.disconnect"
    counted = bounded(receiving(b"ab", b"cd", b"ef"), 4)
    assert [(await counted())["type"] for _ in range(3)] == ["http.request", "http.request", "http.disconnect"]


@pytest.mark.parametrize("body", [b'{"a": "\\u00e9\\ud83d\\ude00"}', b'{"a": "\\\\u0000 \\\\ud800"}', b"[]"])
async def test_valid_json_is_accepted(body: bytes) -> None:
    await check_json(body, b"application/json; charset=utf-8")


@pytest.mark.parametrize(
    "body",
    [
        b'{"\\ud800": 1}',
        b'["\\uDFFF"]',
        b'{"a": ["\\u0000"]}',
        b'{"a":1,"a":2}',
        b"[1,]",
        b"[NaN]",
        b"[" * 33 + b"]" * 33,
    ],
)
async def test_invalid_json_is_rejected(body: bytes) -> None:
    with pytest.raises(Problem) as caught:
        await check_json(body, b"application/json")
    assert caught.value.status == 400
