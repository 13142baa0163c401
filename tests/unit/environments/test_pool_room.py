"""Room is given back episode by episode: how long groups take, who waits for whom, and what that costs in calls."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments import pool as module
from tests.environment_workers import SleepingPool, ask, sleeping_pool
from tests.virtual_time import run_in_virtual_time
from volley.errors import GroupGone
from volley.rollout import PROGRAM_GRACE_S

LAG = 2 * module.LOOK_EVERY_S  # until the pool knows that an episode has ended, at the most


@pytest.fixture(autouse=True)
def cancelled_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.pool.ray.cancel", lambda ref: ref.cancel())


def run(main: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(main)


def seconds_of_all(groups: Sequence[Sequence[float]], **workers: Any) -> tuple[float, SleepingPool]:
    """How long a pool takes for these groups, asked for at once."""

    async def main() -> tuple[float, SleepingPool]:
        pool = await sleeping_pool(**workers)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(ask(pool, str(at), seconds) for at, seconds in enumerate(groups)))
        took = asyncio.get_running_loop().time() - began
        await pool.stop()
        return took, pool

    return run_in_virtual_time(main())


@pytest.mark.parametrize(("room", "most"), [(16, 70), (8, 85)])
def test_groups_with_a_slow_episode_each_run_beside_each_other(room: int, most: float) -> None:
    took, _ = seconds_of_all([[60.0] + [1.0] * 7] * 8, episodes=room)
    assert 60 < took < most, "one after the other, they would take 480 s; two at a time, 240 s"


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """Groups, and a room that is large enough for each."""
    groups = draw(st.lists(st.lists(st.floats(0, 200), min_size=1, max_size=6), min_size=1, max_size=10))
    return groups, draw(st.integers(max(map(len, groups)), 12))


@given(load=loads())
def test_one_worker_is_full_while_groups_wait(load: tuple[list[list[float]], int]) -> None:
    groups, room = load
    took, pool = seconds_of_all(groups, episodes=room)
    programs = pool.made[0].programs
    assert programs.most <= room
    every = [each for seconds in groups for each in seconds]
    assert took <= sum(every) / room + max(every) + LAG * len(groups)
    assert programs.started == [(str(at), str(key)) for at, seconds in enumerate(groups) for key in range(len(seconds))]


@given(load=loads(), count=st.integers(2, 3))
def test_on_several_workers_no_group_is_passed_over(load: tuple[list[list[float]], int], count: int) -> None:
    groups, room = load
    _, pool = seconds_of_all(groups, episodes=room, count=count)
    assert sum(len(worker.programs.started) for worker in pool.made) == sum(map(len, groups))
    for worker in pool.made:
        assert worker.programs.most <= room
        first = [int(group) for group, key in worker.programs.started if key == "0"]
        assert first == sorted(first)


def test_a_group_that_found_room_for_a_part_waits_no_longer_for_a_worker() -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=4)
        tasks = [ask(pool, name, seconds) for name, seconds in (("a", (90, 90, 90)), ("b", (5, 5, 5)), ("c", (1,)))]
        await asyncio.sleep(1)
        assert (pool.waiting, pool.workers()[0].busy) == (1, 4), "c waits; of b, one runs"
        await tasks[1]
        await asyncio.sleep(0.01)
        assert pool.made[0].programs.started[-1] == ("c", "0"), "the answer said that there is room"
        await asyncio.gather(*tasks)
        await pool.stop()

    run(main())


def test_a_group_that_is_cancelled_while_a_part_of_it_waits_starts_nothing_more() -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=4)
        first, second, third = (ask(pool, name, seconds) for name, seconds in _PARTLY)
        await asyncio.sleep(1)
        second.cancel()
        await asyncio.sleep(1)
        assert pool.waiting == 0
        assert pool.made[0].programs.started[3:] == [("b", "0"), ("c", "0")], "c has the place of b"
        await asyncio.gather(first, third)
        assert [key for group, key in pool.made[0].programs.started if group == "b"] == ["0"]
        assert pool.workers()[0].busy == 0
        await pool.stop()

    run(main())


_PARTLY: list[tuple[str, Sequence[float]]] = [("a", (90, 90, 90)), ("b", (60, 60, 60)), ("c", (1, 1, 1))]


def test_a_stuck_worker_ends_the_groups_that_it_has_and_is_replaced() -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=4)
        stuck, partly = ask(pool, "a", (10, 10, 10), stuck="thread"), ask(pool, "b", (20, 20, 20))
        last = ask(pool, "c", (5, 5))
        assert (await stuck).stuck == "thread"
        assert len((await partly).outcomes) == 3
        await last
        assert len(pool.made) == 2
        assert [group for group, _ in pool.made[1].programs.started] == ["c", "c"]
        await pool.stop()

    run(main())


def test_a_retired_worker_ends_what_waits_in_it() -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=2, count=2)
        tasks = [ask(pool, name, (30, 30)) for name in "abcd"]
        tasks[0].cancel()
        await asyncio.sleep(35)
        await pool.scale(1)
        await asyncio.gather(*tasks[1:])
        assert pool.count == 1
        await pool.stop()
        assert all(not worker.programs.running for worker in pool.made)

    run(main())


@pytest.mark.parametrize(("running", "rounds"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_the_deadline_of_a_group_allows_for_its_wait_in_the_worker(running: int, rounds: int) -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=4, timeout_s=100)
        if running:
            ask(pool, "before", (99,) * running)
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        pool.made[0].hangs = True
        before = asyncio.get_running_loop().time()
        with pytest.raises(GroupGone):
            await ask(pool, "late", (1, 1, 1))
        assert asyncio.get_running_loop().time() - before == pytest.approx(rounds * (100 + PROGRAM_GRACE_S))
        await pool.stop()

    run(main())


@given(slow=st.floats(10, 99), n=st.integers(1, 8), running=st.integers(0, 8))
def test_no_group_in_time_misses_its_deadline(slow: float, n: int, running: int) -> None:
    """Episodes that take all their time, with a place coming free only at its end."""

    async def main() -> None:
        pool = await sleeping_pool(episodes=8, timeout_s=100)
        groups = [ask(pool, "0", (slow,) * running)] if running else []
        groups += [ask(pool, str(at), (100,) * n) for at in range(1, 4)]
        await asyncio.gather(*groups)
        assert pool.deaths == ()
        await pool.stop()

    run(main())


def test_looks_are_few_and_only_where_episodes_are() -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=1, count=30)
        await asyncio.sleep(60)
        assert calls(pool) == 0
        groups = [ask(pool, str(at), (100,)) for at in range(30)]
        await asyncio.sleep(50)
        calm = calls(pool)
        assert calm <= 30 * 50 / module.CALM_LOOK_S
        groups += [ask(pool, "late", (1,))]
        await asyncio.sleep(20)
        assert calls(pool) - calm <= 20 / module.LOOK_EVERY_S * module.LOOKS_AT_ONCE
        assert min(worker.left.calls for worker in pool.made) > 0, "each in turn"
        await asyncio.gather(*groups)
        await pool.stop()

    def calls(pool: SleepingPool) -> int:
        return sum(worker.left.calls for worker in pool.made)

    run(main())


def test_a_worker_that_does_not_answer_looks_does_not_keep_the_pool_from_others() -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=2, count=2)
        groups = [ask(pool, str(at), (50, 1)) for at in range(2)]
        await asyncio.sleep(0.1)
        pool.made[0].hangs = True
        groups += [ask(pool, "late", (1, 1))]
        await groups[-1]
        assert asyncio.get_running_loop().time() < 10
        await asyncio.gather(*groups)
        await pool.stop()

    run(main())


def test_only_episodes_that_run_make_a_worker_busy() -> None:
    async def main() -> None:
        pool = await sleeping_pool(episodes=4)
        groups = [ask(pool, "a", (100, 20, 20)), ask(pool, "b", (20, 20, 20))]
        await asyncio.sleep(10)
        assert pool.usage().busy_seconds == pytest.approx(4 * 10), "two wait"
        await asyncio.gather(*groups)
        used = pool.usage()
        assert used.episodes == 6
        assert 200 <= used.busy_seconds <= 200 + 5 * module.CALM_LOOK_S, "60 s of which three ran, then one"
        assert used.room_seconds == pytest.approx(400)
        await pool.stop()

    run(main())
