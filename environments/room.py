"""The room of one worker: it runs a limited number of episodes at once, of many groups."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from environments.programs import Ended, timed


class Runner(Protocol):
    """`environments.programs.Programs`, or those of another interpreter."""

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Ended: ...


class Room:
    """Runs episodes, at most ``places`` at once, in the order in which they come.

    An episode has a place only while it runs, whatever the others of its group do. One that timed out gives its place
    back even if its program cannot be ended: the worker gets no further group then, but must end those that it has.

    Args:
        timeout_s: seconds per episode, after which its session ends, whatever its program still does.
        end_session: called with an episode's address and key when it is over, perhaps more than once.
    """

    def __init__(
        self, programs: Runner, places: int, timeout_s: float, end_session: Callable[[str, str], Awaitable[None]]
    ) -> None:
        self._programs, self._timeout, self._end_session = programs, timeout_s, end_session
        self._places = asyncio.Semaphore(places)  # hands them out in the order of the calls
        self._left: dict[int, int] = {}

    def left(self) -> dict[int, int]:
        """How many episodes have not ended of each group that is here, by the group's number."""
        return dict(self._left)

    async def run(self, number: int, row: Mapping[str, Any], base_url: str, keys: Sequence[str]) -> list[Ended]:
        """Run one episode per key. If this is cancelled, those that wait for a place never start.

        Args:
            number: the group's; no other group that is here at the same time has it.
        """
        self._left[number] = len(keys)
        came = time.perf_counter()
        episodes = [asyncio.create_task(self._episode(number, came, row, base_url, key)) for key in keys]
        try:
            return await asyncio.gather(*episodes)
        finally:
            for each in episodes:
                each.cancel()  # if one fails, `gather` leaves the others alone; does nothing to those that have ended
            del self._left[number]

    async def _episode(self, number: int, came: float, row: Mapping[str, Any], base_url: str, key: str) -> Ended:
        async with self._places:
            waited = time.perf_counter() - came
            late = asyncio.create_task(self._end_late(base_url, key))
            try:
                ended = await timed(self._programs.run(row, base_url, key))
            finally:
                late.cancel()
        await self._end_session(base_url, key)  # before the others of its group: what is left of the program may go on
        self._left[number] -= 1
        return ended._replace(outcome=replace(ended.outcome, waited=waited))

    async def _end_late(self, base_url: str, key: str) -> None:
        """End the session of an episode that takes too long: a program that is cancelled may go on for a while."""
        await asyncio.sleep(self._timeout)
        await self._end_session(base_url, key)
