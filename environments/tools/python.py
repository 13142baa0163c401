"""The tool ``python``: the model's code, run in the sandbox.

Every slot is a thread with a sandbox of its own, since a sandbox ends with the thread that started it.
"""

import asyncio
import contextlib
import queue
import re
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from environments.tools.base import ToolProblem, Use, described
from reward_servers.sandbox.health import Sandbox
from reward_servers.sandbox.judge import Case, ProgramResult
from reward_servers.sandbox.slot import SlotEnded
from volley.errors import ToolUnavailable
from volley.records import VerdictStatus
from volley.rollout import PythonTool

_SANDBOX_FRAME = re.compile(r'  File "[^"\n]*", line \d+, in run_as_main\n(?: {4}.*\n)*')
_UNJUDGED = Case(stdin=b"", check=lambda stdout: None)  # whatever a program prints is fine


class _Work(NamedTuple):
    source: bytes
    done: "Future[ProgramResult]"


class Python:
    """Runs each call as a program of its own: nothing is kept between calls.

    Raises:
        HostError: this host cannot isolate programs as ``spec`` asks.
    """

    name = "python"

    def __init__(self, spec: PythonTool) -> None:
        self._spec = spec
        self._work: queue.Queue[_Work | None] = queue.Queue()
        self._started: list[Future[Sandbox]] = [Future() for _ in range(spec.slots)]
        self._threads = [
            threading.Thread(target=self._serve, args=(started,), name="python tool", daemon=True)
            for started in self._started
        ]
        for thread in self._threads:
            thread.start()
        try:
            for started in self._started:
                started.result()
        except BaseException:
            self.close()
            raise
        self.schema = schema_of(spec)

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Use]:
        """Nothing is kept between calls."""
        yield self._call

    def stuck(self) -> bool:
        """Never: every program ends within its limits."""
        return False

    def close(self) -> None:
        """End the sandboxes, and the programs in them."""
        for _ in self._threads:
            self._work.put(None)
        for started in self._started:
            if started.exception() is None:
                started.result().end()
        for thread in self._threads:
            thread.join()

    async def _call(self, given: Mapping[str, Any]) -> str:
        work = _Work(code_of(given), Future())
        self._work.put(work)
        return shown(await asyncio.wrap_future(work.done))  # a cancelled episode cancels its work if it still waits

    def _serve(self, started: "Future[Sandbox]") -> None:
        try:
            sandbox = Sandbox(self._spec.sandbox)
        except Exception as problem:  # noqa: BLE001 - the constructor raises it
            started.set_exception(problem)
            return
        started.set_result(sandbox)
        while (work := self._work.get()) is not None:
            if work.done.set_running_or_notify_cancel():
                _run(sandbox, work)
        sandbox.close()


def _run(sandbox: Sandbox, work: _Work) -> None:
    try:
        work.done.set_result(sandbox.judge(work.source, [_UNJUDGED]))
    except SlotEnded:
        work.done.set_exception(ToolUnavailable("the tool python was closed"))
    except Exception as problem:  # noqa: BLE001 - the caller raises it
        work.done.set_exception(problem)


def code_of(given: Mapping[str, Any]) -> bytes:
    """The program that the model wrote. Raises `ToolProblem` if the arguments are something else."""
    code = given.get("code")
    if set(given) != {"code"} or not isinstance(code, str):
        raise ToolProblem("the only argument of python is code, a string")
    return code.encode("utf-8", "surrogatepass")


def shown(result: ProgramResult) -> str:
    """What the model sees of a program's run.

    Raises:
        ToolUnavailable: the sandbox failed, which says nothing about the program.
    """
    if not result.status.bears_reward:
        raise ToolUnavailable(f"the tool python: {result.detail}")
    streams = (result.last.stdout, result.last.stderr) if result.last else ()
    parts = [_SANDBOX_FRAME.sub("", stream.decode("utf-8", "backslashreplace")) for stream in streams]
    if result.status is not VerdictStatus.PASSED:
        parts.append(f"error: {result.detail}")
    text = "".join(part if part.endswith("\n") or not part else f"{part}\n" for part in parts).replace("\0", "\\0")
    return text.rstrip("\n") or "(the program printed nothing)"


def schema_of(spec: PythonTool) -> Mapping[str, Any]:
    """The tool as OpenAI's API describes it."""
    packages = f", {', '.join(spec.sandbox.packages)}" if spec.sandbox.packages else ""
    description = (
        f"Run a Python program and see what it prints. The standard library{packages} can be imported. Nothing is kept "
        "between calls."
    )
    return described(Python.name, description, _PARAMETERS)


_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "the program; print what you want to see"}},
    "required": ["code"],
}
