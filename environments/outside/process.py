"""One child process: orders to it, its answers, what it prints, and its end."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from environments.outside.interpreter import Outside, as_line, clean_environment, kill_group, last_line, unusable
from environments.programs import CANCEL_SECONDS, one_line, read_outcome
from environments.records import Outcome

LONGEST_LINE = 1 << 20  # bytes
LOGGED, FLOOD = 1 << 20, 64 << 20  # bytes of output within a minute: what the log keeps, and what ends the child
MINUTE = 60.0
GRACE_SECONDS = 1.0


class Child:
    """One child process, from `start` until it has ``ended``, which then says why."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.ended = ""
        self.retired = False
        self._process = process
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Outcome]] = {}
        self._abandoned: set[int] = set()
        self._pong: asyncio.Future[bool] | None = None
        self._output = _Output()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, outside: Outside, seconds: float) -> "Child":
        """Start a process and import the program in it.

        Raises:
            JobError: there is no such interpreter, the program cannot be imported or called there within ``seconds``.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *outside.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(),
                start_new_session=True,  # one signal ends it with all that it started
                limit=LONGEST_LINE,
            )
        except OSError as problem:
            raise outside.not_started(problem) from None
        started = cls(process)
        started._tasks.append(asyncio.create_task(started._copy_output()))
        try:
            await started._greet(outside, seconds)
        except BaseException:
            started.end("it did not start")
            raise
        started._tasks += [asyncio.create_task(started._read()), asyncio.create_task(started._watch())]
        return started

    @property
    def usable(self) -> bool:
        """Whether it takes further episodes."""
        return not self.ended and not self.retired

    async def run(self, order: Mapping[str, Any], seconds: float) -> Outcome | None:
        """Run one episode; None if it took longer than ``seconds``."""
        number = next(self._numbers)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        try:
            line = as_line({"run": number, **order})
        except (TypeError, ValueError) as problem:
            return Outcome(failure=one_line(f"the row cannot be sent to the program as JSON: {problem}"))
        if self.ended:
            return self._lost()
        self._open[number] = ended
        self._send(line)
        try:
            if (await asyncio.wait({ended}, timeout=seconds))[0]:
                return ended.result()
            self._send(as_line({"cancel": number}))
            if not (await asyncio.wait({ended}, timeout=CANCEL_SECONDS))[0]:
                await self._retire()
            return None
        except asyncio.CancelledError:
            self._send(as_line({"cancel": number}))
            raise
        finally:
            if not ended.done():
                self._abandoned.add(number)
            self._end_if_idle()

    async def _retire(self) -> None:
        """An episode does not end: take no further ones, and end now if the event loop is blocked."""
        self.retired = True
        if self._pong is None:
            self._pong = asyncio.get_running_loop().create_future()
            self._send(as_line({"ping": 1}))
        answered, _ = await asyncio.wait({self._pong}, timeout=CANCEL_SECONDS)
        if not answered:
            self.end("a program that timed out blocked it")

    def _end_if_idle(self) -> None:
        if self.retired and not self._open.keys() - self._abandoned:
            self.end("a program that timed out could not be ended otherwise")

    async def _greet(self, outside: Outside, seconds: float) -> None:
        self._send(outside.hello())
        try:
            async with asyncio.timeout(seconds):
                first = await _readline(self._process.stdout)
        except TimeoutError:
            raise outside.refused(f"it did not answer within {seconds:g} s") from None
        problem = unusable(first)
        if problem is not None:
            await asyncio.sleep(0.1)  # for the last words to be copied
            raise outside.refused(problem or self._output.last_line or "it ended without an answer; is it Python?")

    async def _read(self) -> None:
        try:
            while (line := await _readline(self._process.stdout)).endswith(b"\n"):
                if not self._take(line):
                    self.end(f"it sent something else than an answer: {line[:60]!r}")
                    return
        except asyncio.LimitOverrunError:
            self.end(f"it sent a line of more than {LONGEST_LINE} bytes")
            return
        self._end_without_pipe()

    def _take(self, line: bytes) -> bool:
        """Read one line of the child; returns whether it was an answer to something."""
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(said, dict):
            return False
        if "pong" in said and self._pong is not None and not self._pong.done():
            self._pong.set_result(True)
            return True
        number = said.get("ended")
        if type(number) is not int or (waiting := self._open.pop(number, None)) is None:
            return False
        if not waiting.done():
            waiting.set_result(_outcome(said))
        self._abandoned.discard(number)
        self._end_if_idle()
        return True

    async def _copy_output(self) -> None:
        stream = self._process.stderr
        while stream is not None and (piece := await stream.read(1 << 16)):
            if not self._output.take(piece):
                self.end(f"it printed more than {FLOOD >> 20} MiB within a minute")
                return

    async def _watch(self) -> None:
        await exited(self._process.pid)
        kill_group(self._process.pid)  # what it started may hold its pipes open
        reaped = asyncio.create_task(self._process.wait())
        await asyncio.wait({*self._tasks[:2], reaped}, timeout=GRACE_SECONDS)  # for what it wrote before
        code = self._process.returncode
        reaped.cancel()
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        last = self._output.last_line
        self.end(f"it died ({how})" + (f": {last}" if last else ""))

    def end(self, why: str) -> None:
        """Kill the process, and fail the episodes in it. Does nothing to one that has ended."""
        if self.ended:
            return
        self.ended = why
        kill_group(self._process.pid)
        if self._open:
            self._output.note(f"the program's process was ended: {why}")
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_result(self._lost())
        self._open.clear()

    async def stop(self) -> None:
        """Kill the process and wait for its end."""
        self.end("it was stopped")
        reaped = asyncio.create_task(self._process.wait())
        await asyncio.wait({reaped, *self._tasks}, timeout=5 * GRACE_SECONDS)

    def _lost(self) -> Outcome:
        return Outcome(failure=one_line(f"the program's process ended: {self.ended}"))

    def _send(self, line: bytes) -> None:
        stdin = self._process.stdin
        if self.ended or stdin is None:
            return
        if stdin.is_closing():  # uvloop, which Ray's workers use, raises RuntimeError on a write
            self._end_without_pipe()
            return
        with contextlib.suppress(ConnectionError):  # the same, noticed by this write
            stdin.write(line)

    def _end_without_pipe(self) -> None:
        """End a child that cannot be talked to, unless it died, which `_watch` reports better."""
        asyncio.get_running_loop().call_later(2 * GRACE_SECONDS, self.end, "it closed its pipe")


class Tail:
    """The last ``most`` bytes of a process's output."""

    def __init__(self, most: int = 1 << 13) -> None:
        self._most, self._kept = most, b""

    def take(self, piece: bytes) -> None:
        self._kept = (self._kept + piece)[-self._most :]

    async def take_all(self, stream: asyncio.StreamReader | None) -> None:
        """Take what comes, until the stream ends."""
        while stream is not None and (piece := await stream.read(1 << 16)):
            self.take(piece)

    @property
    def text(self) -> bytes:
        return self._kept


class _Output:
    """Copies what a child prints to this process's standard error, up to a limit per minute."""

    def __init__(self) -> None:
        self._begun, self._bytes = time.monotonic(), 0
        self._tail = Tail()

    def take(self, piece: bytes) -> bool:
        """Copy a piece of output; returns False once it is a flood."""
        if time.monotonic() - self._begun > MINUTE:
            self._begun, self._bytes = time.monotonic(), 0
        self._tail.take(piece)
        room = LOGGED - self._bytes
        self._bytes += len(piece)
        if room > 0:
            _write_all(piece[:room])
            if len(piece) >= room:
                self.note(f"further output of this minute is left out: the log keeps {LOGGED >> 20} MiB per minute")
        return self._bytes <= FLOOD

    def note(self, text: str) -> None:
        """Write a line of this process's own."""
        _write_all(f"\n[{text}]\n".encode())

    @property
    def last_line(self) -> str:
        """The last line that is not blank, such as that of a traceback."""
        return last_line(self._tail.text)


def _write_all(text: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk ends no episode
        while text:
            text = text[os.write(2, text) :]


def _outcome(said: Mapping[str, Any]) -> Outcome:
    """The outcome that a child reports."""
    if "raised" in said:
        return Outcome(failure=one_line(f"the program raised {said['raised']}"))
    if "wrong" in said:
        return Outcome(failure=one_line(f"the program returned {said['wrong']}"))
    return read_outcome(said.get("returned"))


async def exited(pid: int) -> None:
    """Wait for the end of a child process, whoever holds its pipes."""
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        loop.add_reader(descriptor, exited.set)
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _readline(stream: asyncio.StreamReader | None) -> bytes:
    """The next line; without its end if the stream ends. Raises `LimitOverrunError`."""
    if stream is None:
        raise RuntimeError("the process was started without a pipe")
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
