"""The child process of the ``python`` scorer: ``python -m reward_servers.scorers.python_child TARGET TAKES TIMEOUT_S``.

It first prints ``{"id": 0, "async", "group", "source"}``, or ``error`` and so on if the import fails. Each call is one
JSON line ``{"id", "sample" or "samples", "row"}`` on standard input, answered with one line on the original standard
output: ``{"id"}`` and either ``results`` with one entry per sample, or ``error`` (what the function did),
``traceback``, ``mistake`` and ``retry_after``. Calls of an async function run at once, others one after the other. What
the function prints goes to standard error.
"""

import asyncio
import hashlib
import inspect
import json
import math
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from reward_servers.scorers.functions import RewardFunction, is_async, load_function, takes_group
from volley.processes import die_with_parent, take_stdout

MAX_TRACEBACK = 8000  # characters
# Raised by code that is wrong, whatever the state of servers and networks.
MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)
FROM_A_SERVER = (LookupError, ValueError)  # an async function may raise these because of what a server answered


class BadResult(ValueError):
    """The function returned something else than rewards."""


def main() -> None:
    die_with_parent()  # a function that hangs must not outlive the worker
    replies = take_stdout()
    target, takes, timeout_s = sys.argv[1:]
    try:
        function = load_function(target)
    except Exception as problem:  # noqa: BLE001 - as in `answer`
        print(json.dumps({"id": 0, **raised(problem.__cause__ or problem)}), file=replies)
        sys.exit(1)
    concurrent = is_async(function)
    about = {"async": concurrent, "group": takes_group(function, takes or None), "source": source_of(function)}
    print(json.dumps({"id": 0, **about}), file=replies)
    if concurrent:
        asyncio.run(serve_at_once(function, float(timeout_s), replies))
    else:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps({"id": request["id"], **answer(function, request)}), file=replies)


def source_of(function: RewardFunction) -> str:
    """A checksum of the file that defines ``function``; "" if there is no such file."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # an instance of a class
        file = inspect.getsourcefile(type(function))
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


async def serve_at_once(function: RewardFunction, timeout_s: float, replies: TextIO) -> None:
    """Answer calls as they arrive, each in a task of its own, until standard input ends."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    async def serve(request: dict[str, Any]) -> None:
        found = await answer_async(function, request, timeout_s)
        print(json.dumps({"id": request["id"], **found}), file=replies)

    threading.Thread(target=read, daemon=True).start()
    tasks = set[asyncio.Task[None]]()
    while line := await lines.get():
        task = asyncio.create_task(serve(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def answer(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    """Call the function, and turn what it returns or raises into a reply."""
    try:
        return results_of(function(*_arguments(request)), request)
    except Exception as problem:  # noqa: BLE001 - a fault-tolerance point: the user's function failed, not the worker
        return raised(problem)


async def answer_async(function: RewardFunction, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """As `answer`, for an async function, which is cancelled after ``timeout_s``."""
    bound = asyncio.timeout(timeout_s)
    try:
        async with bound:
            result = await function(*_arguments(request))
        return results_of(result, request)
    except (Exception, asyncio.CancelledError) as problem:  # noqa: BLE001 - as in `answer`; a library may cancel
        if bound.expired():
            return {"error": f"gave no answer within {timeout_s:g} s"}
        return raised(problem, waits=True)


def _arguments(request: dict[str, Any]) -> tuple[Any, Any]:
    return request["samples"] if "samples" in request else request["sample"], request["row"]


def results_of(result: object, request: dict[str, Any]) -> dict[str, Any]:
    """The reply for what the function returned.

    Raises:
        BadResult: it is neither a reward nor, for a group, a list of them.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise BadResult("returned a coroutine, though it is not declared with async def: declare it so")
    if "samples" not in request:
        if isinstance(result, list | tuple):
            raise BadResult(
                f"returned a {type(result).__name__} for one sample: return a number or a dict; a function that is to "
                "get the whole group names its first parameter samples, or the job sets takes: group"
            )
        return {"results": [_checked(result)]}
    count = len(request["samples"])
    rewards = list(result) if isinstance(result, Iterable) and not isinstance(result, str | dict) else None
    if rewards is None or len(rewards) != count:
        what = type(result).__name__ if rewards is None else f"{len(rewards)} rewards"
        raise BadResult(f"returned {what} for a group of {count} samples: return a list with one reward per sample")
    missing = {"error": "returned None for this sample"}
    return {"results": [missing if reward is None else _checked(reward) for reward in rewards]}


def _checked(result: object) -> dict[str, Any]:
    fields: dict[str, Any] = result if isinstance(result, dict) else {"reward": result}
    if fields.get("reward") is None:
        raise BadResult(f"returned {result!r:.60}: return a number, or a dict with the key reward")
    reward = float(fields["reward"])
    rank = None if fields.get("rank") is None else float(fields["rank"])
    for name, number in (("reward", reward), ("rank", rank)):
        if number is not None and not math.isfinite(number):
            return {"error": f"returned a value that is no finite number: the {name} is {number}"}
    return {
        "reward": reward,
        "rank": rank,
        "answer": None if fields.get("answer") is None else str(fields["answer"]),
        "detail": str(fields.get("detail", "")),
    }


def raised(problem: BaseException, *, waits: bool = False) -> dict[str, Any]:
    """The answer for a call that raised: the error with the line that raised it, and the traceback.

    Args:
        waits: the function is async, so it probably asked a server.
    """
    if isinstance(problem, BadResult):
        return {"error": str(problem), "mistake": "returned no reward"}
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
    error, where = traceback.format_exception_only(problem)[-1].strip(), ""
    if frames:
        where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name}, in {frames[-1].name})"
    told = "".join(traceback.format_exception(problem.with_traceback(_users_part(problem))))
    return {
        "error": f"raised {error}{where}",
        "traceback": told[-MAX_TRACEBACK:],
        "mistake": f"{type(problem).__name__}{where}" if _is_mistake(problem, waits=waits) else "",
        "retry_after": _retry_after(problem),
    }


def _users_part(problem: BaseException) -> Any:
    part = problem.__traceback__
    while part is not None and part.tb_frame.f_code.co_filename == __file__:
        part = part.tb_next
    return part


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    """The exception and those it was raised from or after."""
    seen: set[int] = set()
    while problem is not None and id(problem) not in seen:
        seen.add(id(problem))
        yield problem
        problem = problem.__cause__ or problem.__context__


def _is_mistake(problem: BaseException, *, waits: bool) -> bool:
    """Whether this is a programming error. A library's own exception, or a server's failure beneath, makes it none."""
    chain = list(_chain(problem))
    if waits and any(isinstance(each, FROM_A_SERVER) for each in chain):
        return False
    return all(isinstance(each, MISTAKES) and type(each).__module__ == "builtins" for each in chain)


def _retry_after(problem: BaseException) -> float | None:
    """Seconds that a server asked to wait: ``Retry-After`` of the exception's response, as httpx and openai keep it."""
    headers = getattr(getattr(problem, "response", None), "headers", None) or {}
    try:
        seconds = float(str(headers.get("retry-after")))
    except (AttributeError, ValueError):  # absent, or a date
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


if __name__ == "__main__":
    main()
