"""Keeps server processes up: starts them, restarts them when they end or hang, and stops them in order."""

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from volley.errors import HostError, VolleyError
from volley.processes import die_with_parent, last_lines

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
PROBE_SECONDS = 5.0
STEADY_SECONDS = 60.0  # the delay before a restart does not grow for a server that was up this long
LONGEST_DELAY = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server process.

    Attributes:
        answers: raises `HostError` unless the server answers in time.
        start_seconds: time limit until it first answers.
        stop_seconds: time between SIGTERM and SIGKILL.
        stdin: its standard input, for secrets that must not be visible in the list of processes.
        hung_seconds: it is killed after this time without an answer; None never kills it.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    answers: Callable[[], Awaitable[None]]
    start_seconds: float
    stop_seconds: float
    stdin: bytes = b""
    hung_seconds: float | None = 60.0


@contextlib.asynccontextmanager
async def kept_up(server: Server) -> AsyncIterator[asyncio.Future[None]]:
    """Keep ``server`` up while the block runs, whatever happens to its process.

    Yields what ends when the server first answers, or raises `HostError` if it does not start. Once it has started,
    restarts are tried forever.
    """
    keeper = _ServerKeeper(server, asyncio.get_running_loop().create_future())
    keeping = asyncio.create_task(keeper.keep(), name=server.name)
    try:
        yield keeper.started
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        if keeper.process is not None:  # not in the task, which may be cancelled before it begins
            await _stop(server, keeper.process)


@dataclass(slots=True)
class _ServerKeeper:
    server: Server
    started: asyncio.Future[None]
    process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        """Start the process, and restart it whenever it ends."""
        server, delay = self.server, 0.0
        try:
            self.process = await _start(server)
        except VolleyError as error:
            if not self.started.cancelled():  # as it is when whoever waits for it is
                self.started.set_exception(error)
            return
        if not self.started.cancelled():
            self.started.set_result(None)
        while True:
            began = time.monotonic()
            if self.process is not None:
                await _wait_for_end(server, self.process)
            delay = 0.5 if time.monotonic() - began > STEADY_SECONDS else min(LONGEST_DELAY, 2 * delay + 0.5)
            log.warning("%s ended and is restarted in %.1f s; its log: %s", server.name, delay, server.log)
            await asyncio.sleep(delay)
            try:
                self.process = await _start(server)
                log.warning("%s is up again", server.name)
            except VolleyError as error:  # a declared point: try again
                self.process = None
                log.warning("%s", error)


async def _start(server: Server) -> asyncio.subprocess.Process:
    """Start the process and wait until it answers."""
    with server.log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *server.command,
            env=dict(server.environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
    deadline = time.monotonic() + server.start_seconds
    try:
        await _write_stdin(process, server.stdin)
        while time.monotonic() < deadline and process.returncode is None:
            with contextlib.suppress(HostError):
                await server.answers()
                return process
            await asyncio.sleep(POLL_SECONDS)
    except asyncio.CancelledError:
        await _stop(server, process)
        raise
    ended = process.returncode
    await _stop(server, process)
    why = f"ended with code {ended}" if ended is not None else f"did not answer within {server.start_seconds:g} s"
    raise HostError(f"{server.name} {why}; {server.log} ends with: {_end_of(server.log)}")


async def _write_stdin(process: asyncio.subprocess.Process, data: bytes) -> None:
    if process.stdin is not None:
        with contextlib.suppress(ConnectionError):  # it died at once; its log says why
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()


async def _wait_for_end(server: Server, process: asyncio.subprocess.Process) -> None:
    """Wait until the process ends; kill it if it stops answering."""
    answered, failed = time.monotonic(), 0
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS):
                await process.wait()
                return
        if server.hung_seconds is None:
            continue
        try:
            await server.answers()
            answered, failed = time.monotonic(), 0
        except HostError:
            failed += 1
            # One failed probe may mean that this process, and not the server, was too busy.
            if (silent := time.monotonic() - answered) > server.hung_seconds and failed > 1:
                log.warning("%s has not answered for %.0f s; killing it", server.name, silent)
                process.kill()


async def _stop(server: Server, process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(server.stop_seconds):
            await process.wait()
    except TimeoutError:
        log.warning("%s does not end; killing it", server.name)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _end_of(log: Path) -> str:
    return " | ".join(line.strip() for line in last_lines(log, 3).splitlines()) or "nothing"
