"""Start roles and tasks side by side, and be sure that each is stopped."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

CANCEL_AGAIN_SECONDS = 1.0


class Stoppable(Protocol):
    """A role that is started and must be stopped."""

    async def stop(self) -> None: ...


Role = TypeVar("Role", bound=Stoppable)
T = TypeVar("T")


async def start_all(stack: contextlib.AsyncExitStack, *starts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Await ``starts`` together; ``stack`` stops every role that came up, also when another did not.

    Raises:
        The first error of a start; the starts still under way are cancelled.
    """

    async def enter(start: Coroutine[Any, Any, Role]) -> Role:
        role = await start
        stack.push_async_callback(role.stop)
        return role

    try:
        async with asyncio.TaskGroup() as tasks:
            entering = [tasks.create_task(enter(start)) for start in starts]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return [task.result() for task in entering]


async def timed(start: Coroutine[Any, Any, T], name: str, seconds: dict[str, float]) -> T:
    """The result of ``start``; ``seconds[name]`` is how long it took."""
    begun = time.monotonic()
    started = await start
    seconds[name] = round(time.monotonic() - begun, 3)
    return started


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` until all have ended; how they ended is theirs to tell.

    Once is not enough: redis-py sends within `asyncio.wait_for`, which before Python 3.12 drops a cancellation that
    comes as the sending ends, and a loop then goes on for ever.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_SECONDS)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is not itself a group."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
