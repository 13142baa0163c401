"""Which worker gets a group, and which of the waiting groups is next, over workers without processes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from environments.loads import EnvironmentHandle
from environments.pool import EnvironmentPool
from environments.records import EnvironmentConfig, EpisodesDone, Outcome, Stuck
from volley.errors import WorkerDied
from volley.records import Prompt
from volley.rollout import EnvironmentWorkersSpec, ProgramRollout

EPISODES = 8  # at once on a worker


class Remote:
    """A remote method."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class Programs:
    """A worker whose groups end when the test says so."""

    def __init__(self) -> None:
        self.running: list[tuple[str, asyncio.Future[EpisodesDone]]] = []
        self.ready, self.run, self.close = Remote(self._ready), Remote(self._run), Remote(self._ready)

    async def _ready(self) -> int:
        return 1

    async def _run(self, _number: int, row: Mapping[str, Any], _url: str, keys: tuple[str, ...]) -> EpisodesDone:
        ended: asyncio.Future[EpisodesDone] = asyncio.get_running_loop().create_future()
        self.running.append((row["id"], ended))
        return await ended

    def end(self, at: int = 0, stuck: Stuck = "") -> None:
        """Let one of its groups end."""
        _, ended = self.running.pop(at)
        ended.set_result(EpisodesDone((Outcome(1.0),), 1.0, stuck))


class Pool(EnvironmentPool):
    """The real pool over them."""

    def _create(self, index: int) -> EnvironmentHandle:
        worker = EnvironmentHandle(index, f"environment-{index}", cast(Any, Programs()), EPISODES)
        self._living.add(worker)
        return worker

    def _kill(self, worker: EnvironmentHandle) -> None:
        self._living.discard(worker)
        for _, ended in worker.actor.running:
            ended.set_exception(WorkerDied(worker.name, "killed"))
        worker.actor.running.clear()

    def at(self, index: int) -> Programs:
        """The worker with this index."""
        programs: Programs = self._loads.workers[index].actor
        return programs


@pytest.fixture
async def pool(tmp_path: Path) -> Pool:
    spec = EnvironmentWorkersSpec(count=2, episodes=EPISODES)
    pool = Pool(EnvironmentConfig(ProgramRollout(target="a:b"), spec, tmp_path))
    await pool.scale(2)
    return pool


async def ask(pool: Pool, *names: str, n: int = 4) -> list[asyncio.Task[EpisodesDone]]:
    """Ask for groups of n episodes, one after the other."""
    keys = tuple(map(str, range(n)))
    tasks = [asyncio.create_task(pool.run(Prompt(name, "x"), "http://host", keys)) for name in names]
    await settle()
    return tasks


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def groups(pool: Pool) -> list[list[str]]:
    """The groups that each worker runs."""
    return [[name for name, _ in pool.at(index).running] for index in range(pool.count)]


async def test_groups_go_to_the_least_loaded_worker_and_those_that_wait_are_served_in_order(pool: Pool) -> None:
    tasks = await ask(pool, "a", "b", "c", "d", "e", "f", "g")
    assert groups(pool) == [["a", "c"], ["b", "d"]]
    assert pool.waiting == 3
    pool.at(1).end()
    await settle()
    assert groups(pool) == [["a", "c"], ["d", "e"]]
    pool.at(0).end()
    pool.at(0).end()
    await settle()
    assert groups(pool) == [["f", "g"], ["d", "e"]]
    assert pool.waiting == 0
    for index in (0, 0, 1, 1):
        pool.at(index).end()
    assert len(await asyncio.gather(*tasks)) == 7
    usage = pool.usage()
    assert usage.episodes == 28
    assert 0 < usage.busy_seconds <= usage.room_seconds


async def test_a_group_that_gives_up_waiting_lets_the_next_one_through(pool: Pool) -> None:
    tasks = await ask(pool, "a", "b", "c", "d", "e", "f")
    tasks[4].cancel()
    await settle()
    assert pool.waiting == 1
    pool.at(0).end()
    await settle()
    assert groups(pool) == [["c", "f"], ["b", "d"]]


async def test_a_worker_that_was_replaced_leaves_its_place_to_the_new_one(pool: Pool) -> None:
    """Groups of the dead worker end after its successor has begun; they change nothing of the successor's load."""
    tasks = await ask(pool, "a", "b", "c", "d")
    pool.at(0).end(stuck="loop")
    await settle()
    assert isinstance(await settled(tasks[2]), Exception)
    assert [len(each) for each in groups(pool)] == [0, 2]
    await ask(pool, "e", "f")
    assert groups(pool) == [["e", "f"], ["b", "d"]]


async def test_episodes_of_a_retired_worker_do_not_count_as_use_of_those_that_are_left(pool: Pool) -> None:
    tasks = await ask(pool, "a", "b", "c", "d")
    retired = pool.at(1)
    await pool.scale(1)
    before = pool.usage()
    await asyncio.sleep(0.02)
    used = pool.usage() - before
    assert 0 < used.busy_seconds <= used.room_seconds
    retired.end()
    retired.end()
    await settle()
    before = pool.usage()
    await asyncio.sleep(0.02)
    used = pool.usage() - before
    assert used.busy_seconds == pytest.approx(used.room_seconds), "the other worker is as busy as it was"
    pool.at(0).end()
    pool.at(0).end()
    assert len(await asyncio.gather(*tasks)) == 4


async def test_a_stuck_worker_gets_no_further_group(pool: Pool) -> None:
    await ask(pool, "a", "b", "c", "d", "e")
    pool.at(0).end(stuck="thread")
    await settle()
    assert groups(pool) == [["c"], ["b", "d"]]
    assert pool.waiting == 1
    pool.at(1).end()
    await settle()
    assert groups(pool) == [["c"], ["d", "e"]]


async def settled(task: asyncio.Task[EpisodesDone]) -> EpisodesDone | BaseException:
    """What became of the task."""
    (found,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
    return found
