"""Start roles side by side, and be sure that each is stopped."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar


class Stoppable(Protocol):
    """A role that is started and must be stopped."""

    async def stop(self) -> None: ...


Role = TypeVar("Role", bound=Stoppable)


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


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is not itself a group."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
