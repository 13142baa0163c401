"""Slow, greedy or hostile clients on real sockets, and servers in which a background task has died."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.api.cluster import NoCluster
from services.api.jobs import ProcessChecker
from services.stack.redis import embedded_redis
from services.store.redis import TOKENS_KEY, Store
from tests.integration.api.servers import ADMIN, Api, a_job, make_run, serving
from tests.models import tiny_llama
from volley.errors import HostError

pytestmark = pytest.mark.integration


async def send(api: Api, *pieces: bytes, pause: float = 0.0, seconds: float = 10) -> bytes:
    """Everything the server sends after these bytes, until it closes or is silent for half a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    answer = b""
    try:
        async with asyncio.timeout(seconds):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            while piece := await asyncio.wait_for(reader.read(65536), 3):
                answer += piece
                if b"\r\n\r\n" in answer:
                    break
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


HEAD = b"POST /v1/jobs/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def test_bodies_that_are_too_large_are_rejected_however_they_are_sent(redis_url: str) -> None:
    async with serving(redis_url, max_body=2048) as api:
        declared = await send(api, HEAD + b"Content-Length: 99999999\r\n\r\n")
        assert status(declared) == 413
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
        assert status(await send(api, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk, chunk)) == 413
        for body in (b" " * (50 << 20), spaces(50)):
            huge = await api.http.post("/v1/jobs/check", content=body, headers={"Content-Type": "application/json"})
            assert huge.status_code == 413, "the answer arrives while the client is still sending"
        small = await api.http.post("/v1/jobs/check", json={"job": {}})
        assert small.status_code == 422


async def spaces(megabytes: int) -> AsyncIterator[bytes]:
    for _ in range(megabytes):
        yield b" " * (1 << 20)


async def test_an_unread_body_must_end_within_its_time(redis_url: str) -> None:
    async with serving(redis_url, max_body=2048, head_seconds=0.5) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(HEAD + b"Content-Length: 99999999\r\n\r\n")
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < 5 and not reader.at_eof():
                writer.write(b" " * 64)
                await writer.drain()
                await asyncio.sleep(0.05)
        assert 0.3 < time.monotonic() - begun < 2.5
        writer.close()


async def test_a_body_that_never_arrives_times_out(redis_url: str) -> None:
    async with serving(redis_url, body_seconds=0.5) as api:
        begun = time.monotonic()
        assert status(await send(api, HEAD + b"Content-Length: 10\r\n\r\n{")) == 408
        assert time.monotonic() - begun < 3


async def test_a_request_head_that_never_ends_times_out(redis_url: str) -> None:
    async with serving(redis_url, head_seconds=0.5) as api:
        for first in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"):
            begun = time.monotonic()
            assert await send(api, first) == b""
            assert time.monotonic() - begun < 2.5
        good = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(good)
        assert b"200" in await reader.readuntil(b"\r\n")
        await asyncio.sleep(0.7)
        writer.write(good)  # a connection may be idle between two requests
        assert b"ok" in await asyncio.wait_for(reader.readuntil(b"}"), 3)
        writer.write(good[:20])
        assert b"HTTP" not in (await asyncio.wait_for(reader.read(), 3)).partition(b"}")[2]
        writer.close()
    async with serving(redis_url) as api:
        assert (
            status(await send(api, b"GET / HTTP/1.1\r\nHost: localhost\r\n", *[b"X-A: " + b"a" * 9000 + b"\r\n"] * 10))
            == 0
        )
        assert status(await send(api, b"GET /" + b"a" * 99_000)) == 0
        assert (await api.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"job": ' + b'{"a":' * 40 + b"1" + b"}" * 41, 400),
        (b'{"job": {}, "job": {}}', 400),
        (b'{"job": {"steps": NaN}}', 400),
        (b'{"job": {"steps": ' + b"9" * 5000 + b"}}", 400),
        (b'{"job": {"name": "\\ud800"}}', 400),
        (b'{"job": {"model": {"path": "/a\\u0000b"}}}', 400),
        (b'{"job": {"name": "\\\\u0000"}}', 422),
        (b"[]", 422),
        (b"null", 422),
        (b"", 422),
        (b'{"job": {"steps": 1e999}}', 422),
        (b'{"job": {"kind": "rl", "seed": ' + b"9" * 400 + b"}}", 422),
    ],
)
async def test_hostile_bodies_are_rejected(api: Api, body: bytes, expected: int) -> None:
    for path in ("/v1/jobs/check", "/v1/runs"):
        answer = await api.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == expected, answer.text
        assert answer.headers["content-type"] == "application/problem+json"


async def test_bodies_that_are_not_json_are_rejected(api: Api) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        answer = await api.http.post("/v1/jobs/check", content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 415


async def test_only_the_client_over_its_rate_is_limited(redis_url: str) -> None:
    async with serving(redis_url, admin_token=ADMIN, rate=0.1, burst=5) as api:
        other = (await api.http.post("/v1/tokens", json={"name": "other", "scope": "read"})).json()["token"]
        answers = await asyncio.gather(*(api.http.get("/v1/runs") for _ in range(20)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) in (15, 16), "one of five was used for the token"
        assert 1 <= int(refused[0].headers["retry-after"]) <= 10
        own = {"Authorization": f"Bearer {other}"}
        assert (await api.http.get("/v1/runs", headers=own)).status_code == 200
        guesses = [
            (await api.http.get("/v1/runs", headers={"Authorization": f"Bearer guess-{i}"})).status_code
            for i in range(20)
        ]
        assert 429 in guesses, "wrong tokens are counted per address"


async def test_an_unavailable_redis_is_reported_and_survived(tmp_path: Path) -> None:
    async with embedded_redis(tmp_path / "data", tmp_path / "redis.log") as url:
        socket = Path(url.removeprefix("unix://"))
        async with serving(url, redis_retries=0) as api:
            run_id = await make_run(api)
            assert (await api.http.get("/readyz")).json() == {"ready": True, "redis": "ok", "ray": "ok"}
            aside = socket.with_suffix(".aside")
            socket.rename(aside)
            await _close_connections(api)
            away = await api.http.get("/readyz")
            assert away.status_code == 503
            assert [error["pointer"] for error in away.json()["errors"]] == ["redis"]
            answer = await api.http.get(f"/v1/runs/{run_id}")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.headers["content-type"] == "application/problem+json"
            assert (await api.http.get("/healthz")).status_code == 200
            aside.rename(socket)
            assert (await api.http.get(f"/v1/runs/{run_id}")).status_code == 200


async def _close_connections(api: Api) -> None:
    context: Any = api.server.config.app.state.context  # type: ignore[union-attr]
    await context.store._redis.connection_pool.disconnect()


async def test_the_server_ends_if_a_background_task_dies() -> None:
    async def part() -> None:
        await asyncio.sleep(0.1)
        raise HostError("the supervisor is beside itself")

    async with serving("redis://127.0.0.1:1", background=[part]) as api:
        async with asyncio.timeout(10):
            while not api.server.should_exit:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.02)
        assert isinstance(api.server.failure, HostError)


async def test_the_server_process_starts_reports_errors_and_ends_on_sigterm(redis_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.api.serve"]

    def run(settings: str) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(command, input=settings.encode(), capture_output=True, timeout=60, check=False)

    async with Store(redis_url) as store:
        await store._redis.delete(TOKENS_KEY)
    bad = await asyncio.to_thread(run, '{"redis_url": "x", "admin_token": "hunter2"}')
    assert bad.returncode == 2
    assert b"hunter2" not in bad.stdout + bad.stderr
    settings = f'{{"redis_url": "{redis_url}", "ray_address": "http://127.0.0.1:1", "port": 0, "host": "0.0.0.0"}}'
    refused = await asyncio.to_thread(run, settings)
    assert refused.returncode != 0
    assert b"other machines can reach" in refused.stderr
    settings = settings.replace("0.0.0.0", "127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(settings.encode())
    process.stdin.close()
    await asyncio.sleep(4)
    os.kill(process.pid, signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 15) in (0, -signal.SIGTERM)


async def test_a_job_is_checked_in_a_separate_process(redis_url: str, tmp_path: Path) -> None:
    async with serving(redis_url, checker=ProcessChecker(60)) as api:
        job = a_job(data={"path": str(tmp_path / "nothing.jsonl")})
        answer = await api.http.post("/v1/jobs/check", json={"job": job})
        assert answer.status_code == 422
        assert "nothing.jsonl" in answer.json()["detail"]
    async with serving(redis_url, checker=ProcessChecker(0.05)) as api:
        answer = await api.http.post("/v1/jobs/check", json={"job": job})
        assert (answer.status_code, "check_seconds" in answer.json()["detail"]) == (503, True)


class SmallCluster(NoCluster):
    """A node with 1 GiB; Ray does not answer while ``away``."""

    away = False

    async def memory_by_node(self) -> list[int]:
        if self.away:
            raise HostError("Ray does not answer")
        return [1 << 30]


async def test_a_job_that_needs_more_memory_than_the_cluster_has_is_rejected(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    model, cluster = tiny_llama(tmp_path / "model"), SmallCluster()
    job = a_job(model={"path": str(model)}, data={"path": str(tmp_path / "prompts.jsonl")})
    async with serving(redis_url, checker=ProcessChecker(120, cluster)) as api:
        answer = await api.http.post("/v1/jobs/check", json={"job": job}, timeout=120)
        assert answer.status_code == 422, answer.text
        assert "of memory and the cluster's node has 1.0 GiB: lower actors.count" in answer.json()["detail"]
        cluster.away = True
        answer = await api.http.post("/v1/jobs/check", json={"job": job}, timeout=120)
        assert answer.status_code == 200, "it waits in the queue"


@pytest.mark.parametrize("sent", [b"", HEAD + b"Content-Length: 100\r\n\r\n{"], ids=["silent", "unfinished body"])
async def test_connections_without_a_whole_request_do_not_keep_others_out(redis_url: str, sent: bytes) -> None:
    async with serving(redis_url, live_clients=1) as api:
        silent = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(560)]
        for _, writer in silent[10:]:
            writer.write(sent)
        for _, writer in silent[:10]:  # one that was answered, and says nothing since, is no better
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.5)
        for _ in range(5):
            answer = await send(api, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status(answer) == 200, answer
        assert (await api.http.post("/v1/jobs/check", json={"job": {}})).status_code == 422
        for _, writer in silent:
            writer.close()
