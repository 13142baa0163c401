"""Start roles and asyncio tasks together, and make sure that every one of them is stopped."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar, overload

CANCEL_AGAIN_SECONDS = 1.0


class Stoppable(Protocol):
    """A role that was started and must be stopped."""

    async def stop(self) -> None: ...


A = TypeVar("A", bound=Stoppable)
B = TypeVar("B", bound=Stoppable)
C = TypeVar("C", bound=Stoppable)
D = TypeVar("D", bound=Stoppable)
T = TypeVar("T")


@overload
async def start_all(stack: contextlib.AsyncExitStack, a: Coroutine[Any, Any, A], /) -> tuple[A]: ...


@overload
async def start_all(
    stack: contextlib.AsyncExitStack, a: Coroutine[Any, Any, A], b: Coroutine[Any, Any, B], /
) -> tuple[A, B]: ...


@overload
async def start_all(
    stack: contextlib.AsyncExitStack,
    a: Coroutine[Any, Any, A],
    b: Coroutine[Any, Any, B],
    c: Coroutine[Any, Any, C],
    /,
) -> tuple[A, B, C]: ...


@overload
async def start_all(
    stack: contextlib.AsyncExitStack,
    a: Coroutine[Any, Any, A],
    b: Coroutine[Any, Any, B],
    c: Coroutine[Any, Any, C],
    d: Coroutine[Any, Any, D],
    /,
) -> tuple[A, B, C, D]: ...


@overload
async def start_all(stack: contextlib.AsyncExitStack, *starts: Coroutine[Any, Any, A]) -> tuple[A, ...]: ...


async def start_all(stack: contextlib.AsyncExitStack, *starts: Coroutine[Any, Any, Stoppable]) -> tuple[Stoppable, ...]:
    """Await ``starts`` concurrently. ``stack`` stops every role that started, even if another one failed to.

    Raises:
        The first error of a start, after cancelling the starts that are still under way.
    """

    async def enter(start: Coroutine[Any, Any, Stoppable]) -> Stoppable:
        role = await start
        stack.push_async_callback(role.stop)
        return role

    try:
        async with asyncio.TaskGroup() as tasks:
            entering = [tasks.create_task(enter(start)) for start in starts]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return tuple(task.result() for task in entering)


async def timed(start: Coroutine[Any, Any, T], name: str, seconds: dict[str, float]) -> T:
    """The result of ``start``; its duration is stored as ``seconds[name]``."""
    begun = time.monotonic()
    started = await start
    seconds[name] = round(time.monotonic() - begun, 3)
    return started


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and wait until all have ended. Their results and errors are left for the caller to read.

    Each task is cancelled again every second: redis-py sends inside `asyncio.wait_for`, which before Python 3.12 loses
    a cancellation that arrives just as the send completes, and a loop around it would then run forever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in ``group`` that is not itself a group."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
