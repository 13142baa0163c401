"""Runs programs under an interpreter of their own: standard library only, Python 3.10 or later, nothing of Volley.

One JSON object per line. Standard input and output carry them; what programs print goes to standard error.

    to this process     {"target": "agent:solve", "file": null, "path": [...], "behind": [], "settings": null,
                         "rows": null}
                        {"run": 1, "row": {...}, "base_url": "...", "api_key": "..."}
                        {"cancel": 1}
                        {"ping": 1}
    from this process   {"ready": "3.12.3"} or {"unusable": "why"}                                    the first line
                        {"ended": 1, "returned": null or {"reward": 0.5, ...}}
                        {"ended": 1, "raised": "ValueError: no luck"}
                        {"ended": 1, "wrong": "something to await: ..."}               what it returned is no result
                        {"pong": 1}

With a number as "rows", the target is called with the settings and returns at most this many rows of data: lines of
{"row": {...}}, and at last {"rows": 3}. Nothing else is read or written then.

Episodes overlap: async programs share one event loop, which answers pings too; every call of a plain function has a
thread. When standard input ends, so do this process and its process group.
"""

from __future__ import annotations  # lets older versions read as far as the line that rejects them

import asyncio
import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

VERSION = ".".join(map(str, sys.version_info[:3]))
LONGEST = 100_000  # characters of a text that a program returns


class Unusable(Exception):
    """The program cannot be imported or called; the text says why."""


class WrongReturn(Exception):
    """The program returned what is no result; the text says what and why."""


def load(hello: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the program. Raises `Unusable`."""
    if sys.version_info < (3, 10):  # noqa: UP036 - not Volley's interpreter
        raise Unusable(f"it is Python {VERSION}; 3.10 or later is needed")
    sys.path[:1] = hello["path"]  # in place of this file's own folder
    sys.path += hello["behind"]
    os.environ["PYTHONPATH"] = os.pathsep.join(hello["path"])  # for the processes that the program starts
    module_name, _, name = hello["target"].partition(":")
    try:
        if hello["file"]:
            spec = importlib.util.spec_from_file_location(module_name, hello["file"])
            if spec is None or spec.loader is None:
                raise ImportError(f"{hello['file']} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:  # the module's own code may raise anything
        traceback.print_exc()
        raise Unusable(f"module {module_name!r} does not import: {described(problem)}") from problem
    program = getattr(module, name, None)
    if hello["settings"] is not None and callable(program):
        program = set_up(program, hello["settings"])
    if hello["rows"] is not None:
        return functools.partial(itertools.islice, program, hello["rows"])
    if not callable(program):
        near = difflib.get_close_matches(name, [each for each, value in vars(module).items() if callable(value)], n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise Unusable(f"module {module_name!r} has no function {name!r}{meant}")
    if inspect.isclass(program):
        raise Unusable(
            f"{name!r} is a class, and rollout.python runs functions only: write async def solve(row, base_url, "
            "api_key), and keep what episodes share in variables of the module"
        )
    try:
        inspect.signature(program).bind({}, base_url="", api_key="")
    except (TypeError, ValueError) as problem:
        raise Unusable(f"{problem}; write def {name}(row, base_url, api_key)") from None
    called: Callable[..., Any] = program
    return called


def set_up(adapter: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """What an adapter makes of the job's settings. Raises `Unusable`."""
    try:
        return adapter(settings)
    except (Exception, SystemExit) as problem:  # so may the environment's
        traceback.print_exc()
        raise Unusable(f"the environment cannot be set up: {described(problem)}") from problem


def described(problem: BaseException) -> str:
    try:
        text = str(problem)
    except Exception:  # noqa: BLE001 - a method of the program
        text = ""
    return f"{type(problem).__name__}: {text}".removesuffix(": ")[:2000]


class Episodes:
    """Runs episodes on ``loop``, and writes how they ended to ``replies``."""

    def __init__(self, program: Callable[..., Any], loop: asyncio.AbstractEventLoop, replies: TextIO) -> None:
        self._program, self._loop, self._replies = program, loop, replies
        self._is_async = inspect.iscoroutinefunction(program)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._writing = threading.Lock()

    def obey(self, order: Mapping[str, Any]) -> None:
        """Carry out one line of standard input. Called on the loop."""
        if "ping" in order:
            self.reply(pong=order["ping"])
        elif "cancel" in order:
            if (task := self._tasks.get(order["cancel"])) is not None:
                self._cancelled.add(order["cancel"])
                task.cancel()
        else:
            episode = functools.partial(
                self._program, order["row"], base_url=order["base_url"], api_key=order["api_key"]
            )
            if self._is_async:
                self._tasks[order["run"]] = self._loop.create_task(self._await(order["run"], episode))
            else:
                threading.Thread(target=self._call, args=(order["run"], episode), daemon=True).start()

    def reply(self, **fields: object) -> None:
        """Write one line."""
        line = json.dumps(fields, allow_nan=False) + "\n"
        with self._writing:
            self._replies.write(line)
            self._replies.flush()

    async def _await(self, number: int, episode: Callable[[], Any]) -> None:
        try:
            ended: dict[str, Any] = {"returned": plain(await episode())}
        except WrongReturn as problem:
            ended = {"wrong": str(problem)}
        except BaseException as problem:  # noqa: BLE001 - the program failed, not this process
            if not isinstance(problem, asyncio.CancelledError) or number not in self._cancelled:
                traceback.print_exc()
            ended = {"raised": described(problem)}
        self._tasks.pop(number, None)
        self._cancelled.discard(number)
        self.reply(ended=number, **ended)

    def _call(self, number: int, episode: Callable[[], Any]) -> None:
        try:
            ended: dict[str, Any] = {"returned": plain(episode())}
        except WrongReturn as problem:
            ended = {"wrong": str(problem)}
        except BaseException as problem:  # noqa: BLE001 - as above
            traceback.print_exc()
            ended = {"raised": described(problem)}
        self.reply(ended=number, **ended)


def plain(returned: object) -> dict[str, Any] | None:
    """What a program returned, as JSON. The other side checks it. Raises `WrongReturn`."""
    if returned is None:
        return None
    if is_awaitable(returned):
        raise WrongReturn("something to await: declare it with async def")
    fields: dict[Any, Any] = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    for name in ("answer", "detail"):
        if fields.get(name) is not None:
            fields[name] = text = str(fields[name])
            if len(text) > LONGEST:
                raise WrongReturn(f"{len(text)} characters of {name}; at most {LONGEST} are allowed")
    read: dict[str, Any] = {name: fields[name] for name in ("answer", "detail") if name in fields}
    if "reward" in fields:
        read["reward"] = number(fields["reward"])
    return {**read, **{str(name)[:100]: None for name in list(fields)[:10] if name not in ("reward", *read)}}


def is_awaitable(value: object) -> bool:
    """Whether ``value`` should have been awaited. A coroutine is closed, else Python warns of it."""
    if inspect.iscoroutine(value):
        value.close()
    return inspect.isawaitable(value)


def number(value: object) -> float | str | None:
    """A finite float or None; anything else as text. Raises `WrongReturn` for a number that is not finite."""
    if value is None or isinstance(value, (str, bytes)):
        return None if value is None else repr(value)[:100]
    if is_awaitable(value):
        raise WrongReturn("something to await as the reward; await it in an async def")
    try:
        converted = float(value)  # type: ignore[arg-type]
    except OverflowError:
        converted = float("inf")
    except (TypeError, ValueError):
        return repr(value)[:100]
    if converted - converted != 0.0:
        raise WrongReturn(f"the reward {converted}; return a finite number")
    return converted


def listen(episodes: Episodes, loop: asyncio.AbstractEventLoop, orders: TextIO) -> None:
    """Pass the lines of standard input to the loop, until they end."""
    for line in orders:
        loop.call_soon_threadsafe(episodes.obey, json.loads(line))
    os.killpg(0, signal.SIGKILL)  # the group has only what this process started


def main() -> None:
    """Serve until standard input ends."""
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    hello = json.loads(orders.readline())
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        program = load(hello)
        if hello["rows"] is not None:
            write_rows(program(), replies)
            return
    except Unusable as problem:
        replies.write(json.dumps({"unusable": str(problem)}) + "\n")
        replies.flush()
        return
    episodes = Episodes(program, loop, replies)
    episodes.reply(ready=VERSION)
    threading.Thread(target=listen, args=(episodes, loop, orders), daemon=True).start()
    loop.run_forever()


def write_rows(rows: Iterable[Mapping[str, Any]], replies: TextIO) -> None:
    """Write rows of data. Raises `Unusable` if they cannot be made."""
    count = 0
    try:
        for row in rows:
            replies.write(json.dumps({"row": row}, allow_nan=False) + "\n")
            count += 1
    except Exception as problem:
        traceback.print_exc()
        raise Unusable(f"its rows cannot be made: {described(problem)}") from problem
    replies.write(json.dumps({"rows": count}) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
