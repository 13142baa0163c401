"""A child process that calls one trusted function and can be killed if it hangs."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

START_DEADLINE_S = 60.0  # the user's imports may be heavy
KILL_SECONDS = 10.0
EXIT_SECONDS = 1.0
POLL_SECONDS = 0.01


class NotImported(Exception):
    """The process could not import the function.

    Attributes:
        answer: what it said of the failure, as of a call that failed.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["error"])
        self.answer = {**answer, "error": f"cannot be imported by the process that calls it: {answer['error']}"}


class Child:
    """A process that has imported the function. Requests and answers are single lines of JSON, matched by their ids.

    Attributes:
        about: what the process said of the function when it started.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_id = 0
        self._output_ended = False
        self._requests: asyncio.WriteTransport | None = None
        self._replies: asyncio.ReadTransport | None = None
        self.about: dict[str, Any] = {}

    @classmethod
    async def start(cls, target: str, takes: str, timeout_s: float) -> "Child":
        """Start the process and wait until it has imported the function.

        Raises:
            EOFError, OSError: it did not start.
            NotImported: the import failed.
        """
        command = [sys.executable, "-m", "reward_servers.scorers.python_child", target, takes, str(timeout_s)]
        importable = os.pathsep.join(path for path in sys.path if path)  # the child can import what this process can
        process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own would wait for pipes that a grandchild holds open
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": importable},
            start_new_session=True,
        )
        child = cls(process)
        loop = asyncio.get_running_loop()
        try:
            child._replies, _ = await loop.connect_read_pipe(lambda: _Lines(child), process.stdout)
            child._requests, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
            child.about = await child._answer(0, START_DEADLINE_S)
            if "error" in child.about:
                raise NotImported(child.about)
        except TimeoutError:
            child.kill()
            raise OSError(f"was not imported within {START_DEADLINE_S:g} s") from None
        except BaseException:
            child.kill()
            raise
        return child

    async def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and return the answer. Several calls may be under way at once.

        Raises:
            TimeoutError, EOFError, OSError, ValueError: the call failed; the child must not be used again.
        """
        if self._requests is None:
            raise OSError("its process was not started")
        self._last_id += 1
        self._requests.write(json.dumps({"id": self._last_id, **request}).encode() + b"\n")
        return await self._answer(self._last_id, timeout_s)

    async def _answer(self, call: int, timeout_s: float) -> dict[str, Any]:
        if self._output_ended:
            raise EOFError(await self._end())
        self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._calls[call]
        except EOFError:
            raise EOFError(await self._end()) from None
        finally:
            del self._calls[call]

    async def _end(self) -> str:
        """How the process ended, in words; it may have closed its output only."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                while self._process.poll() is None:  # noqa: ASYNC110 - Popen has no event
                    await asyncio.sleep(POLL_SECONDS)
        return f"ended its process with exit status {self._process.poll()} before its answer"

    def take(self, line: bytes) -> None:
        """Hand an answer to the call that waits for it; one that waits no more needs no answer."""
        try:
            answer = json.loads(line)
            call = self._calls.get(answer["id"])
        except (ValueError, KeyError, TypeError):
            self.fail(ValueError(f"answered with a line that is no JSON object: {line[:80]!r}"))
            return
        if call is not None and not call.done():
            call.set_result(answer)

    def fail(self, problem: Exception) -> None:
        """Fail every call under way."""
        self._output_ended = self._output_ended or isinstance(problem, EOFError)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(problem)

    def kill(self) -> None:
        """Kill the child and all processes of its session; never waits for a pipe that another process holds open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_SECONDS)
        if self._requests is not None and not self._requests.is_closing():
            self._requests.abort()
        if self._replies is not None:
            self._replies.close()
        self.fail(EOFError())


class _Lines(asyncio.Protocol):
    """Splits what the child writes into lines."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._pieces: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._child.take(b"".join((*self._pieces, end)))
            self._pieces.clear()
        self._pieces.append(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.fail(EOFError())
