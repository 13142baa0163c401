"""Requests while Redis hangs: all of them get their answer within the time of one."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.api.app import create_app
from services.api.auth import BOOTSTRAP, Tokens
from services.api.index import RunIndex
from services.api.settings import ApiSettings
from services.api.shared import SharedRead
from services.store import redis
from volley.errors import HostError
from volley.state import Limits

ANSWER_SECONDS = 0.4
TOKEN = "one-that-nobody-knows"


@pytest.fixture
async def hanging(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of a Redis that accepts connections and never answers."""
    monkeypatch.setattr(redis, "ANSWER_SECONDS", ANSWER_SECONDS)
    writers = []

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for writer in writers:
        writer.close()
    server.close()


@contextlib.asynccontextmanager
async def client_of(app: FastAPI, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs/r/metrics", "/v1/runs/r/samples"])
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_all_requests_are_refused_within_one_timeout_while_redis_hangs(
    hanging: str, path: str, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token, they share the read of the tokens; without, that of the runs, or of the one run's rows."""
    if path != "/v1/runs":
        monkeypatch.setattr(RunIndex, "has", lambda *_: asyncio.sleep(0, True))
    admin = {"admin_token": "x" * 16} if token else {}
    app = create_app(ApiSettings.model_validate({"redis_url": hanging, "redis_retries": 0, **admin}))
    async with client_of(app, **({"Authorization": f"Bearer {token}"} if token else {})) as http:
        begun = time.monotonic()
        answers = await asyncio.gather(*(http.get(path) for _ in range(10)))
    assert time.monotonic() - begun < 4 * ANSWER_SECONDS
    assert {answer.status_code for answer in answers} == {503}
    assert all(answer.headers["Retry-After"] for answer in answers)


class Tardy:
    """A Redis with one hash of tokens, which answers when ``open`` is set."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.asked = 0

    async def hgetall(self, _: str) -> dict[str, str]:
        self.asked += 1
        stored = dict(self.stored)
        await self.open.wait()
        return stored

    def pipeline(self) -> "Tardy":
        return self

    async def __aenter__(self) -> "Tardy":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def watch(self, _: str) -> None: ...

    def multi(self) -> None: ...

    async def execute(self) -> None: ...

    async def hget(self, _: str, name: str) -> str | None:
        return self.stored.get(name)

    def hset(self, _: str, name: str, entry: str) -> None:
        self.stored[name] = entry

    def hdel(self, _: str, name: str) -> None:
        del self.stored[name]

    def xadd(self, *_: object, **__: object) -> None: ...


async def test_known_tokens_work_while_redis_hangs_and_revoked_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.api.auth.HANG_SECONDS", 0.05)
    store = Tardy()
    tokens = Tokens(store, None, guarded=True)
    kept, gone = [(await tokens.make(name, "read", Limits(), BOOTSTRAP)).token for name in ("kept", "gone")]
    assert [await tokens.principal(each) is not None for each in (kept, gone)] == [True, True]
    store.open.clear()
    tokens._known.expire()
    assert await tokens.principal(gone), "known, and the read of the tokens hangs"
    await tokens.delete("gone", BOOTSTRAP)
    assert await tokens.principal(gone) is None
    late = (await tokens.make("late", "read", Limits(), BOOTSTRAP)).token
    assert [await tokens.principal(each) is not None for each in (kept, late)] == [True, True]
    store.open.set()
    await asyncio.sleep(0.01)
    assert await tokens.principal(gone) is None, "the read that hung ended with what it had seen"


async def test_a_read_is_shared_with_its_error_and_outlives_a_client_that_leaves() -> None:
    results: list[Any] = [HostError("away"), 7]
    begun = asyncio.Event()
    go_on = asyncio.Event()

    async def read() -> int:
        begun.set()
        await go_on.wait()
        found = results.pop(0)
        if isinstance(found, Exception):
            raise found
        return int(found)

    shared = SharedRead(read, 60)
    waiting = [asyncio.create_task(shared.get()) for _ in range(3)]
    await begun.wait()
    waiting[0].cancel()
    go_on.set()
    left, *failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(left, asyncio.CancelledError)
    assert [str(each) for each in failed] == ["away", "away"]
    assert await shared.get() == await shared.get() == shared.value == 7


async def test_a_read_that_began_before_a_change_is_not_kept() -> None:
    now, go_on = ["before"], asyncio.Event()

    async def read() -> str:
        seen = now[0]
        if seen == "before":
            await go_on.wait()
        return seen

    shared = SharedRead(read, 60)
    early = asyncio.create_task(shared.get())
    await asyncio.sleep(0.01)
    now[0] = "after"
    shared.expire()
    assert await shared.get() == "after"
    go_on.set()
    assert await early == "before"
    assert await shared.get() == "after"
