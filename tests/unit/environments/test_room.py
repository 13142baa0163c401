"""The room of one worker: how many episodes run at once, in which order, and what ends with a group."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.programs import Ended, Programs
from environments.room import Room
from tests.environment_workers import Sleeps
from tests.virtual_time import run_in_virtual_time
from volley.errors import WorkerDied

LONG = 1e6  # seconds, more than any episode takes
# Seconds, in whole milliseconds: asyncio takes what is due within its clock's nanosecond for due.
DURATIONS = st.lists(st.integers(0, 100_000).map(lambda milliseconds: milliseconds / 1000), min_size=1, max_size=8)


def enter(room: Room, number: int, seconds: Sequence[float], **row: Any) -> asyncio.Task[list[Ended]]:
    keys = [str(at) for at in range(len(seconds))]
    return asyncio.create_task(room.run(number, {"id": str(number), "seconds": seconds, **row}, "", keys))


@given(groups=st.lists(DURATIONS, min_size=1, max_size=8), places=st.integers(1, 10))
def test_places_are_never_exceeded_nor_idle_and_taken_in_order(groups: list[list[float]], places: int) -> None:
    async def main() -> None:
        programs = Sleeps()
        room = Room(programs, places, LONG, programs.tell)
        done = await asyncio.gather(*(enter(room, number, seconds) for number, seconds in enumerate(groups)))
        asked = [(str(number), str(at)) for number, seconds in enumerate(groups) for at in range(len(seconds))]
        assert programs.started == asked
        assert programs.most == min(places, len(asked))
        assert programs.ended == pytest.approx(in_order([each for seconds in groups for each in seconds], places))
        for seconds, ended in zip(groups, done, strict=True):
            assert [each.outcome.seconds for each in ended] == pytest.approx(seconds), "waiting does not count"
        assert room.left() == {}

    run_in_virtual_time(main())


def in_order(seconds: Sequence[float], places: int) -> float:
    """When the last ends if each in turn takes the place that comes free first."""
    free_at = [0.0] * places
    for each in seconds:
        free_at.sort()
        free_at[0] += each
    return max(free_at)


def test_what_waited_and_what_is_left_is_known() -> None:
    async def main() -> None:
        programs = Sleeps()
        room = Room(programs, 2, LONG, programs.tell)
        groups = enter(room, 1, (5, 1)), enter(room, 2, (3, 3))
        await asyncio.sleep(2)
        assert room.left() == {1: 1, 2: 2}
        await asyncio.sleep(2.5)
        assert room.left() == {1: 1, 2: 1}
        first, second = await asyncio.gather(*groups)
        assert [each.outcome.waited for each in (*first, *second)] == pytest.approx([0, 0, 1, 4])

    run_in_virtual_time(main())


def test_a_session_ends_with_its_own_episode() -> None:
    """Whatever the others of its group do; the sessions of a group that is cancelled end with the group."""

    async def main() -> None:
        programs = Sleeps()
        room = Room(programs, 3, LONG, programs.tell)
        group = enter(room, 1, (1, 50, 3))
        await asyncio.sleep(2)
        assert programs.told == [("", "0")]
        await asyncio.sleep(2)
        assert programs.told == [("", "0"), ("", "2")]
        group.cancel()
        await asyncio.wait({group})
        assert programs.told == [("", "0"), ("", "2")]

    run_in_virtual_time(main())


def test_a_session_ends_with_the_time_of_its_episode_though_the_program_goes_on() -> None:
    async def main() -> None:
        programs = Sleeps()
        group = enter(Room(programs, 2, 10.0, programs.tell), 1, (12, 3))
        await asyncio.sleep(11)
        assert (programs.told, programs.running) == ([("", "1"), ("", "0")], 1)
        await group
        assert programs.told == [("", "1"), ("", "0"), ("", "0")]

    run_in_virtual_time(main())


def test_a_group_that_is_cancelled_starts_nothing_more_and_gives_its_places_back() -> None:
    async def main() -> None:
        programs = Sleeps()
        room = Room(programs, 2, LONG, programs.tell)
        first, second, third = enter(room, 1, (50, 9)), enter(room, 2, (50, 50, 50)), enter(room, 3, (1, 1))
        await asyncio.sleep(10)
        assert programs.running == 2
        second.cancel()
        await third
        assert programs.started == [("1", "0"), ("1", "1"), ("2", "0"), ("3", "0"), ("3", "1")]
        assert room.left() == {1: 1}
        first.cancel()
        await asyncio.wait({first, second})
        assert (programs.running, room.left()) == (0, {})

    run_in_virtual_time(main())


def test_a_group_that_cannot_go_on_starts_nothing_more() -> None:
    async def main() -> None:
        programs = Sleeps()
        room = Room(programs, 2, LONG, programs.tell)
        failing, other = enter(room, 1, (1, 5, 5, 5), fails="0"), enter(room, 2, (1, 1))
        with pytest.raises(WorkerDied):
            await failing
        await other
        assert [key for group, key in programs.started if group == "1"] in (["0", "1"], ["0", "1", "2"])
        assert (programs.running, room.left()) == (0, {})

    run_in_virtual_time(main())


async def test_the_time_of_an_episode_starts_with_its_program() -> None:
    async def half(row: Any, base_url: str, api_key: str) -> float:
        await asyncio.sleep(0.5)
        return 1.0

    ended = await Room(Programs(half, timeout_s=2.0), 1, 2.0, Sleeps().tell).run(0, {}, "", ("a",) * 5)
    assert [each.outcome.reward for each in ended] == [1.0] * 5, "2.5 s in all"


async def test_programs_that_cannot_be_ended_give_their_places_back() -> None:
    release = asyncio.Event()

    def hangs(row: Any, base_url: str, api_key: str) -> float:
        if api_key == "hangs":
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60)
        return 1.0

    loop = asyncio.get_running_loop()
    room = Room(Programs(hangs, timeout_s=1.0), 2, 1.0, Sleeps().tell)
    try:
        first, second = await asyncio.gather(room.run(1, {}, "", ("hangs",) * 2), room.run(2, {}, "", ("a",) * 4))
    finally:
        release.set()
    assert [each.stuck for each in first] == ["thread"] * 2
    assert [each.outcome.reward for each in second] == [1.0] * 4
