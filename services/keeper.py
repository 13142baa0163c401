"""Keeps a few server processes up: starts each, starts it again when it ends or hangs, ends it in order."""

import asyncio
import contextlib
import ctypes
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from volley.errors import HostError, VolleyError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
PROBE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
STEADY_SECONDS = 60.0  # after so long a life the next restart does not wait
LONGEST_DELAY = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server process.

    Attributes:
        answers: raises `HostError` unless it answers; bounded.
        start_seconds: until it first answers.
        stop_seconds: between SIGTERM and SIGKILL.
        told: its standard input, for what others must not read in a list of processes.
        hung_seconds: of silence before it is killed. None: never, where a restart costs more than a wait.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    answers: Callable[[], Awaitable[None]]
    start_seconds: float
    stop_seconds: float
    told: bytes = b""
    hung_seconds: float | None = 60.0


@contextlib.asynccontextmanager
async def kept_up(server: Server) -> AsyncIterator[None]:
    """Have ``server`` up for the length of the block, whatever happens to its process.

    Raises:
        HostError: it does not come up at first; later on it is tried again for ever.
    """
    kept = _Kept(server, await _start(server))
    keeping = asyncio.create_task(kept.keep(), name=server.name)
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        if kept.process is not None:  # here, not in the task: one that is cancelled before it began never ends it
            await _stop(server, kept.process)


@dataclass(slots=True)
class _Kept:
    server: Server
    process: asyncio.subprocess.Process | None

    async def keep(self) -> None:
        server, delay = self.server, 0.0
        while True:
            began = time.monotonic()
            if self.process is not None:
                await _until_over(server, self.process)
            delay = 0.5 if time.monotonic() - began > STEADY_SECONDS else min(LONGEST_DELAY, 2 * delay + 0.5)
            log.warning("%s ended, it is started again in %.1f s; its log: %s", server.name, delay, server.log)
            await asyncio.sleep(delay)
            try:
                self.process = await _start(server)
                log.warning("%s is up again", server.name)
            except VolleyError as error:  # a declared point: it is tried again
                self.process = None
                log.warning("%s", error)


async def _start(server: Server) -> asyncio.subprocess.Process:
    """Returns when it answers."""
    with server.log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *server.command,
            env=dict(server.environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    deadline = time.monotonic() + server.start_seconds
    try:
        await _tell(process, server.told)
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
    raise HostError(f"{server.name} {why}; {server.log} ends with: {_tail(server.log)}")


def end_with_parent() -> None:
    """Ask the kernel to stop this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _tell(process: asyncio.subprocess.Process, told: bytes) -> None:
    if process.stdin is not None:
        with contextlib.suppress(ConnectionError):  # it died at once, as its log says
            process.stdin.write(told)
            await process.stdin.drain()
        process.stdin.close()


async def _until_over(server: Server, process: asyncio.subprocess.Process) -> None:
    """Returns when the process has ended, or was killed for its silence."""
    answered = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS):
                await process.wait()
                return
        if server.hung_seconds is None:
            continue
        try:
            await server.answers()
            answered = time.monotonic()
        except HostError:
            if (silent := time.monotonic() - answered) > server.hung_seconds:
                log.warning("%s has not answered for %.0f s, it is killed", server.name, silent)
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
        log.warning("%s does not end, it is killed", server.name)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _tail(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()[-3:] if file.exists() else []
    return " | ".join(line.strip() for line in lines) or "nothing"
