"""The tool ``python``: the model's code, run in the sandbox.

Every slot is a thread with a sandbox of its own, since a sandbox ends with the thread that started it.
"""

import asyncio
import contextlib
import queue
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from environments.tools.base import Seen, ToolProblem, Use, described
from reward_servers.sandbox.health import Sandbox
from reward_servers.sandbox.interpreter import Interpreter
from reward_servers.sandbox.judge import Case, ProgramResult, verdict_of
from reward_servers.sandbox.slot import SandboxFailure, SlotEnded
from volley.errors import ToolUnavailable
from volley.records import VerdictStatus
from volley.rollout import PythonTool

_SANDBOX_FRAME = re.compile(r'  File "[^"\n]*", line \d+, in run_as_main\n(?: {4}.*\n)*')
_UNJUDGED = Case(stdin=b"", check=lambda stdout: None)  # whatever a program prints is fine


_Result = TypeVar("_Result")
_LOST = "(the interpreter was restarted: all that was defined is gone)"


class Python:
    """Runs each call as a program of its own, or those of an episode in one interpreter.

    Raises:
        HostError: this host cannot isolate programs as ``spec`` asks.
    """

    name = "python"

    def __init__(self, spec: PythonTool) -> None:
        self._spec, self.schema = spec, schema_of(spec)
        self._slots = [_SlotThread(spec) for _ in range(spec.slots)]
        self._free: asyncio.Queue[_SlotThread] = asyncio.LifoQueue()  # those with a sandbox before those without
        for slot in reversed(self._slots):
            self._free.put_nowait(slot)
        try:
            self._slots[0].do(lambda sandbox: sandbox.report).result()
        except BaseException:
            self.close()
            raise

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Use]:
        """With state, a slot is held from the first call on."""
        if self._spec.state == "none":
            yield self._call
            return
        held: list[_SlotThread] = []

        async def use(given: Mapping[str, Any]) -> Seen:
            code = code_of(given)
            if not held:
                held.append(await self._free.get())
            return await asyncio.wrap_future(held[0].do(partial(_execute, held[0], code)))

        try:
            yield use
        finally:
            for slot in held:
                self._free_after(slot, slot.do(slot.forget))

    def stuck(self) -> bool:
        """Never: every program ends within its limits."""
        return False

    def close(self) -> None:
        """End the sandboxes, and the programs in them."""
        for slot in self._slots:
            slot.close()

    async def _call(self, given: Mapping[str, Any]) -> Seen:
        code = code_of(given)
        slot = await self._free.get()
        running = slot.do(partial(_judge, code))
        self._free_after(slot, running)
        return shown(await asyncio.wrap_future(running))

    def _free_after(self, slot: "_SlotThread", work: "Future[Any]") -> None:
        """Let others use ``slot`` once ``work`` is done, even if the episode that wanted it was cancelled before."""
        loop = asyncio.get_running_loop()

        def free(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all episodes with it
                loop.call_soon_threadsafe(self._free.put_nowait, slot)

        work.add_done_callback(free)


class _SlotThread:
    """A thread with a sandbox, started by the first work that it is given; runs its work in order."""

    def __init__(self, spec: PythonTool) -> None:
        self._spec = spec
        self._sandbox: Sandbox | None = None
        self.interpreter: Interpreter | None = None
        self._work: queue.Queue[tuple[Callable[[Sandbox], Any], Future[Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="python tool", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[Sandbox], _Result]) -> "Future[_Result]":
        """Run ``work`` in the thread. The result raises HostError if the sandbox does not start."""
        done: Future[_Result] = Future()
        self._work.put((work, done))
        return done

    def forget(self, _: Sandbox) -> None:
        """End the interpreter."""
        if self.interpreter is not None:
            self.interpreter.close()
            self.interpreter = None

    def close(self) -> None:
        self._work.put(None)
        if self._sandbox is not None:
            self._sandbox.end()
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            if done.set_running_or_notify_cancel():
                self._settle(work, done)
        if self._sandbox is not None:
            with contextlib.suppress(SlotEnded):
                self.forget(self._sandbox)
            self._sandbox.close()

    def _settle(self, work: Callable[[Sandbox], Any], done: "Future[Any]") -> None:
        try:
            self._sandbox = self._sandbox or Sandbox(self._spec.sandbox)
            done.set_result(work(self._sandbox))
        except (SandboxFailure, SlotEnded) as problem:
            done.set_exception(ToolUnavailable(f"the tool python: {problem}"))
        except Exception as problem:  # noqa: BLE001 - who waits for the result raises it
            done.set_exception(problem)


def _judge(code: bytes, sandbox: Sandbox) -> ProgramResult:
    return sandbox.judge(code, [_UNJUDGED])


def _execute(slot: _SlotThread, code: bytes, sandbox: Sandbox) -> Seen:
    """What the model sees of one call in the episode's interpreter."""
    slot.interpreter = slot.interpreter or sandbox.interpreter()
    outcome = slot.interpreter.run(code)
    status, detail = verdict_of(outcome, _UNJUDGED)
    text, failed = shown(ProgramResult(status, 0, None, outcome, detail))
    if not slot.interpreter.running:
        text = f"{text}\n{_LOST}"
    return Seen(text, failed or slot.interpreter.raised)


def code_of(given: Mapping[str, Any]) -> bytes:
    """The program that the model wrote. Raises `ToolProblem` if the arguments are something else."""
    code = given.get("code")
    if set(given) != {"code"} or not isinstance(code, str):
        raise ToolProblem("the only argument of python is code, a string")
    return code.encode("utf-8", "surrogatepass")


def shown(result: ProgramResult) -> Seen:
    """What the model sees of a program's run.

    Raises:
        ToolUnavailable: the sandbox failed, which says nothing about the program.
    """
    if not result.status.bears_reward:
        raise ToolUnavailable(f"the tool python: {result.detail}")
    streams = (result.last.stdout, result.last.stderr) if result.last else ()
    parts = [_SANDBOX_FRAME.sub("", stream.decode("utf-8", "backslashreplace")) for stream in streams]
    failed = result.status is not VerdictStatus.PASSED
    if failed:
        parts.append(f"error: {result.detail}")
    text = "".join(part if part.endswith("\n") or not part else f"{part}\n" for part in parts).replace("\0", "\\0")
    return Seen(text.rstrip("\n") or "(the program printed nothing)", failed)


def schema_of(spec: PythonTool) -> Mapping[str, Any]:
    """The tool as OpenAI's API describes it."""
    packages = f", {', '.join(spec.sandbox.packages)}" if spec.sandbox.packages else ""
    kept = "Nothing is kept between calls." if spec.state == "none" else "What a call defines is there in later ones."
    description = f"Run Python code and see what it prints. The standard library{packages} can be imported. {kept}"
    return described(Python.name, description, _PARAMETERS)


_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "what to run; print what you want to see"}},
    "required": ["code"],
}
