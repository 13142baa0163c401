"""Loads and calls the user's program.

Async programs share one event loop in a thread of its own; every call of a plain function has its own thread. An async
program is cancelled when its time is over, a thread cannot be. What has not ended `CANCEL_SECONDS` later, because it
blocks, is a thread, or swallows the cancellation, is reported as stuck: only the end of the worker's process ends it.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import math
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, SupportsFloat

from environments.records import Outcome, Stuck
from volley.errors import JobError, WorkerDied
from volley.imports import function_named
from volley.rollout import ProgramRollout, Rollout

CANCEL_SECONDS = 2.0  # for an async program to end after it was cancelled
DETAIL = 300  # characters

Program = Callable[..., Any]  # a function, or a class with a method `run`


def load_program(target: str) -> Program:
    """Import the function or class named by ``package.module:name``.

    Raises:
        JobError: it cannot be imported, or it or its method ``run`` does not take ``row``, ``base_url``, ``api_key``.
    """
    program = function_named(target, "rollout.target")
    name = target.partition(":")[2]
    if inspect.isclass(program):
        _check_class(program, target, name)
        return program
    if problem := _unlike(program, {}, base_url="", api_key=""):
        raise JobError(
            f"rollout.target {target!r} does not take what it is called with ({problem}): write "
            f"def {name}(row, base_url, api_key)"
        )
    return program


def _check_class(program: type, target: str, name: str) -> None:
    run = getattr(program, "run", None)
    if not callable(run):
        raise JobError(
            f"rollout.target {target!r}: class {name} needs a method async def run(self, row, base_url, api_key)"
        )
    if problem := _unlike(run, None, {}, base_url="", api_key=""):
        raise JobError(
            f"rollout.target {target!r}: {name}.run does not take what it is called with ({problem}): write "
            "async def run(self, row, base_url, api_key)"
        )
    if problem := _unlike(program):
        raise JobError(f"rollout.target {target!r}: {name} is made without arguments, and {problem}: give it defaults")
    for part in ("setup", "close"):
        if inspect.iscoroutinefunction(getattr(program, part, None)) and not is_async(program):
            raise JobError(f"rollout.target {target!r}: {name}.{part} is async and run is not: write async def run")


def _unlike(called: Callable[..., Any], *args: object, **kwargs: object) -> str:
    """Why ``called`` does not take these arguments; "" if it does."""
    try:
        inspect.signature(called).bind(*args, **kwargs)
    except (TypeError, ValueError) as problem:
        return str(problem)
    return ""


def is_async(program: Program) -> bool:
    """Whether the program's episodes run on an event loop."""
    if inspect.isclass(program):
        return inspect.iscoroutinefunction(getattr(program, "run", None))
    return inspect.iscoroutinefunction(program) or inspect.iscoroutinefunction(type(program).__call__)


def load_rollout(rollout: Rollout) -> Program:
    """Import the program of a job that runs under Volley's own interpreter; raises as `load_program`."""
    if not isinstance(rollout, ProgramRollout):
        raise TypeError(f"rollout kind: {rollout.kind} runs under an interpreter of its own")
    return load_program(rollout.target)


class Ended(NamedTuple):
    """The outcome of an episode, and what its program still occupies."""

    outcome: Outcome
    stuck: Stuck = ""


class Programs:
    """Runs episodes of one program until the process ends.

    Args:
        timeout_s: seconds per episode.
        owner: what `close` closes, if the program is not a class that has an instance of its own.
    """

    def __init__(self, program: Program, timeout_s: float, owner: object = None) -> None:
        self._program, self._timeout = program, timeout_s
        self._instance = owner
        self._loop = asyncio.new_event_loop() if is_async(program) else None
        if self._loop is not None:
            threading.Thread(target=_serve, args=(self._loop,), name="episodes", daemon=True).start()

    async def set_up(self) -> None:
        """If the program is a class, make the one instance that runs all episodes.

        Raises:
            WorkerDied: the class or its method ``setup`` raised.
        """
        if not inspect.isclass(self._program):
            return
        try:
            self._instance = await self._call(self._program)
            if (setup := getattr(self._instance, "setup", None)) is not None:
                await self._call(setup)
        except BaseException as problem:
            if is_own_cancellation(problem):
                raise
            traceback.print_exception(problem)
            cause = one_line(f"setting up rollout.target raised {named(problem)}")
            raise WorkerDied("an environment worker", cause) from problem
        self._program = attrgetter("run")(self._instance)

    async def close(self) -> None:
        """Call the method ``close`` of the instance or owner, if it has one. What it raises goes to the log."""
        if (close := getattr(self._instance, "close", None)) is None:
            return
        try:
            await self._call(close)
        except BaseException as problem:
            if is_own_cancellation(problem):
                raise
            traceback.print_exception(problem)

    async def _call(self, function: Callable[[], object]) -> object:
        """Call ``function`` where the episodes run, on their loop or in a thread, and await what it returns."""
        if self._loop is None:
            return await asyncio.to_thread(function)

        async def called() -> object:
            returned = function()
            return await returned if inspect.isawaitable(returned) else returned

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self._loop))

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Ended:
        """Run one episode. Never raises because of the program."""
        if self._loop is None:
            return await self._run_plain(row, base_url, api_key)
        return await self._run_async(self._loop, row, base_url, api_key)

    async def _run_async(
        self, loop: asyncio.AbstractEventLoop, row: Mapping[str, Any], base_url: str, api_key: str
    ) -> Ended:
        async def episode() -> Outcome:
            try:
                return read_outcome(await self._program(dict(row), base_url=base_url, api_key=api_key))
            except BaseException as problem:
                if is_own_cancellation(problem):
                    raise
                return _raised(problem)

        running = _OnLoop(loop, episode())
        try:
            if (outcome := await _within(running.ended, self._timeout)) is not None:
                return Ended(outcome)
        finally:
            running.cancel()  # also if the whole group is cancelled; does nothing to an episode that has ended
        alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        if await _within(running.ended, CANCEL_SECONDS) is not None:
            return Ended(self._timed_out())
        return Ended(self._timed_out(), "thread" if alive.done() else "loop")

    async def _run_plain(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Ended:
        running: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

        def episode() -> None:
            try:
                outcome = read_outcome(self._program(dict(row), base_url=base_url, api_key=api_key))
            except BaseException as problem:  # noqa: BLE001 - the user's program failed, not the worker
                outcome = _raised(problem)
            running.set_result(outcome)

        threading.Thread(target=episode, name="episode", daemon=True).start()
        outcome = await _within(running, self._timeout)
        return Ended(self._timed_out(), "thread") if outcome is None else Ended(outcome)

    def _timed_out(self) -> Outcome:
        return Outcome(failure=f"the program took longer than rollout.timeout_s, {self._timeout:g} s", kind="timeout")


class _OnLoop:
    """An episode's task on ``loop``, seen from another thread.

    Attributes:
        ended: set when the task has ended. A cancelled task may go on, which the future that asyncio makes for another
            thread does not show.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, episode: Coroutine[Any, Any, Outcome]) -> None:
        self.ended: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        self._loop = loop
        self._task: asyncio.Task[Outcome] | None = None
        loop.call_soon_threadsafe(self._start, episode)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def _start(self, episode: Coroutine[Any, Any, Outcome]) -> None:
        self._task = self._loop.create_task(episode)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Outcome]) -> None:
        if task.cancelled():
            outcome = Outcome(failure="the program cancelled itself", kind="raised")
        elif (problem := task.exception()) is not None:
            outcome = _raised(problem)
        else:
            outcome = task.result()
        self.ended.set_result(outcome)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` for ever. A task that a program starts ends it with SystemExit or KeyboardInterrupt."""
    while not loop.is_closed():
        with contextlib.suppress(BaseException):  # who awaits the task gets it
            loop.run_forever()


def is_own_cancellation(problem: BaseException) -> bool:
    """Whether the current task was asked to end and ``problem`` says so, rather than one that its code raised."""
    task = asyncio.current_task()
    return isinstance(problem, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def timed(episode: Awaitable[Ended]) -> Ended:
    """Await an episode, and note how long it took in its outcome."""
    begun = time.perf_counter()
    ended = await episode
    return ended._replace(outcome=replace(ended.outcome, seconds=time.perf_counter() - begun))


async def _within(running: "concurrent.futures.Future[Outcome]", seconds: float) -> Outcome | None:
    """The future's result, or None after ``seconds``."""
    waiting = asyncio.wrap_future(running)
    done, _ = await asyncio.wait({waiting}, timeout=seconds)
    return waiting.result() if done else None


class WrongReturn(ValueError):
    """The program returned what is no result; the text says what it may return."""


def outcome_of(returned: object) -> Outcome:
    """What the program returned: a number, a mapping with ``reward``, ``answer`` and ``detail``, or None.

    Raises:
        WrongReturn: it returned something else, or a reward that is not finite.
    """
    if returned is None:
        return Outcome()
    if is_awaitable(returned):
        raise WrongReturn("the program returned something to await: declare it with async def")
    fields = returned if isinstance(returned, Mapping) else {"reward": returned}
    if unknown := sorted(str(name) for name in fields if name not in ("reward", "answer", "detail")):
        raise WrongReturn(f"the program returned {', '.join(unknown)}; it may return reward, answer and detail")
    reward = fields.get("reward")
    answer, detail = fields.get("answer"), str(fields.get("detail") or "")
    return Outcome(
        None if reward is None else _finite(reward), None if answer is None else str(answer), one_line(detail)
    )


def _finite(reward: object) -> float:
    """The reward as a finite number. Raises `WrongReturn`."""
    if is_awaitable(reward):
        raise WrongReturn("the program returned something to await as the reward; await it in an async def")
    if isinstance(reward, str | bytes) or not isinstance(reward, SupportsFloat):
        raise WrongReturn(f"the program returned {reward!r:.60}; return a number, a mapping with reward, or None")
    try:
        number = float(reward)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):  # an array of several numbers, for example
        raise WrongReturn(f"the program returned {reward!r:.60} as the reward; return one number") from None
    if not math.isfinite(number):
        raise WrongReturn(f"the program returned the reward {number}; return a finite number")
    return number


def is_awaitable(value: object) -> bool:
    """Whether ``value`` should have been awaited. A coroutine is closed, else Python warns of it."""
    if inspect.iscoroutine(value):
        value.close()
    return inspect.isawaitable(value)


def read_outcome(returned: object) -> Outcome:
    """The outcome of a program that returned; a failure if it returned what is no result."""
    try:
        return outcome_of(returned)
    except WrongReturn as problem:
        return Outcome(failure=one_line(str(problem)), kind="raised")


def _raised(problem: BaseException) -> Outcome:
    """The outcome of a program that raised; the log gets the traceback."""
    traceback.print_exception(problem)
    return Outcome(failure=one_line(f"the program raised {named(problem)}"), kind="raised")


def named(problem: BaseException) -> str:
    """The exception's type, and its text if it has one."""
    try:
        text = str(problem)
    except Exception:  # noqa: BLE001 - a method of the program
        text = ""
    return f"{type(problem).__name__}: {text}".removesuffix(": ")


def one_line(text: str) -> str:
    """The text on one line of printable characters, shortened."""
    cut = text if len(text) <= DETAIL else text[: DETAIL - 3] + "..."
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in cut)
