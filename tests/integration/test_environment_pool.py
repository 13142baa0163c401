"""The environment pool with real Ray workers: programs that die, hang and block, and nothing that outlives the pool."""

import asyncio
import os
import signal
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from environments.pool import EnvironmentPool
from environments.records import EnvironmentConfig
from tests.integration.processes import descendants, wait_until_gone
from volley.errors import GroupGone, JobError, WorkerDied
from volley.records import Prompt
from volley.rollout import EnvironmentWorkersSpec, ProgramRollout

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_local")]

NOWHERE = "http://127.0.0.1:9/v1"  # these programs make no call
PROGRAMS = """
import asyncio, os, pathlib, time

async def agent(row, base_url, api_key):
    if row.get("die"):
        os._exit(7)
    if row.get("block") == api_key:
        time.sleep(600)
    if "notes" in row:
        with open(row["notes"], "a") as file:
            file.write(api_key)
    late = "until" in row and row.get("slow", api_key) == api_key
    while late and not pathlib.Path(row["until"]).exists():
        await asyncio.sleep(0.05)
    await asyncio.sleep(row.get("seconds", 0))
    return len(api_key)

class Holder:
    def __init__(self):
        self.log = pathlib.Path(__file__).with_name("holder.log")

    async def setup(self):
        self.note("set up")

    async def run(self, row, base_url, api_key):
        await asyncio.sleep(row.get("seconds", 0))
        self.note("ran")
        return 1.0

    async def close(self):
        self.note("closed")

    def note(self, what):
        with self.log.open("a") as file:
            file.write(f"{what}\\n")

class Unready(Holder):
    async def setup(self):
        flag = pathlib.Path(__file__).with_name("ready")
        if not flag.exists():
            raise OSError("the server is away")

def plain(row, base_url, api_key):
    time.sleep(row.get("seconds", 0) if row.get("slow", api_key) == api_key else 0)
    return 1.0
"""


async def started(
    folder: Path, name: str = "agent", *, timeout: float = 20.0, python: str | None = None, **workers: Any
) -> EnvironmentPool:
    rollout = ProgramRollout(target=f"programs_of_{folder.name}:{name}", timeout_s=timeout, python=python)
    spec = EnvironmentWorkersSpec.model_validate({"episodes": 4, **workers})
    return await EnvironmentPool.start(EnvironmentConfig(rollout, spec, folder, prefix=f"{folder.name}-"))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path_factory.mktemp("environments")
    (made / f"programs_of_{made.name}.py").write_text(PROGRAMS)
    monkeypatch.syspath_prepend(made)
    return made


def row(**fields: Any) -> Prompt:
    return Prompt("p", "", fields)


async def test_episodes_run_at_once_on_workers_with_room(folder: Path) -> None:
    pool = await started(folder, count=2)
    began = time.monotonic()
    done = await asyncio.gather(*(pool.run(row(seconds=1), NOWHERE, ("a", "bb", "ccc", "dddd")) for _ in range(2)))
    assert time.monotonic() - began < 5
    assert [[each.reward for each in group.outcomes] for group in done] == [[1.0, 2.0, 3.0, 4.0]] * 2
    waiting = [asyncio.create_task(pool.run(row(seconds=1), NOWHERE, ("a",) * 4)) for _ in range(3)]
    await asyncio.sleep(0.5)
    assert [each.busy for each in pool.workers()] == [4, 4]
    assert all(len(group.outcomes) == 4 for group in await asyncio.gather(*waiting))
    pids = {each.pid for each in pool.workers()}
    await pool.stop()
    wait_until_gone(pids)


async def test_a_worker_that_dies_is_replaced_and_its_groups_are_lost(folder: Path) -> None:
    pool = await started(folder)
    other = asyncio.create_task(pool.run(row(seconds=15), NOWHERE, ("a",)))
    await asyncio.sleep(0.3)
    with pytest.raises(GroupGone, match="environment-0 died"):
        await pool.run(row(die=True), NOWHERE, ("a", "b"))
    with pytest.raises(GroupGone, match="environment-0 died"):
        await other
    assert (await pool.run(row(), NOWHERE, ("abc",))).outcomes[0].reward == 3.0
    assert len(pool.deaths) == 1
    await pool.stop()


async def test_too_many_deaths_are_the_pools(folder: Path) -> None:
    pool = await started(folder, max_replacements=1)
    for _ in range(2):
        with pytest.raises(GroupGone):
            await pool.run(row(die=True), NOWHERE, ("a",))
    with pytest.raises(WorkerDied, match="environment-0"):
        await pool.run(row(), NOWHERE, ("a",))
    await pool.stop()


async def test_a_program_that_blocks_the_loop_is_ended_with_its_worker(folder: Path) -> None:
    pool = await started(folder, timeout=2)
    (before,) = pool.workers()
    done = await pool.run(row(block="b"), NOWHERE, ("a", "b"))
    assert done.stuck == "loop"
    assert all("timeout_s" in each.failure for each in done.outcomes[1:])
    wait_until_gone({before.pid})
    assert (await pool.run(row(), NOWHERE, ("a",))).outcomes[0].reward == 1.0
    await pool.stop()


async def test_a_function_that_hangs_is_ended_when_the_other_groups_have_ended(folder: Path) -> None:
    pool = await started(folder, "plain", timeout=6)
    (before,) = pool.workers()
    stuck = asyncio.create_task(pool.run(row(seconds=600, slow="b"), NOWHERE, ("a", "b")))
    await asyncio.sleep(4)
    other = asyncio.create_task(pool.run(row(seconds=2.5), NOWHERE, ("c",)))
    done = await stuck
    assert (done.stuck, done.outcomes[0].reward) == ("thread", 1.0)
    assert (await other).outcomes[0].reward == 1.0, "it was left to end"
    wait_until_gone({before.pid})
    assert (await pool.run(row(), NOWHERE, ("a",))).outcomes[0].reward == 1.0
    await pool.stop()


async def test_a_slow_episode_holds_up_its_group_alone(folder: Path) -> None:
    pool = await started(folder, "plain", timeout=120)
    slow = asyncio.create_task(pool.run(row(seconds=600, slow="b"), NOWHERE, ("a", "b")))
    for _ in range(3):
        done = await pool.run(row(), NOWHERE, ("c", "d"))
        assert [each.reward for each in done.outcomes] == [1.0, 1.0]
    assert [each.busy for each in pool.workers()] == [1]
    assert not slow.done()
    slow.cancel()
    await pool.stop()


async def test_groups_that_fill_a_worker_run_beside_each_others_slow_episodes(folder: Path) -> None:
    pool = await started(folder, timeout=120)
    until, notes, keys = folder / "until", folder / "notes", ("s", "aa", "bbb", "cccc")
    begun = sorted("".join(keys) * 3 + "s")  # the last group's slow one takes the last place
    prompt = row(until=str(until), notes=str(notes), slow="s")
    groups = [asyncio.create_task(pool.run(prompt, NOWHERE, keys)) for _ in range(4)]
    for _ in range(600):
        if notes.exists() and sorted(notes.read_text()) == begun:
            break
        await asyncio.sleep(0.1)
    assert sorted(notes.read_text()) == begun
    assert not pool.waiting
    assert [each.busy for each in pool.workers()] == [4], "a slow one of each"
    assert not any(group.done() for group in groups)
    until.touch()
    done = await asyncio.gather(*groups)
    assert [[each.reward for each in group.outcomes] for group in done] == [[1.0, 2.0, 3.0, 4.0]] * 4
    assert pool.deaths == ()
    await pool.stop()


async def test_a_group_that_is_cancelled_while_a_part_of_it_waits_starts_nothing_more(folder: Path) -> None:
    pool = await started(folder, timeout=120)
    until, notes = folder / "until", folder / "notes"
    prompt = row(until=str(until), notes=str(notes))
    first = asyncio.create_task(pool.run(prompt, NOWHERE, ("a", "a", "a")))
    await asyncio.sleep(0.3)
    second = asyncio.create_task(pool.run(prompt, NOWHERE, ("b", "b", "b")))
    for _ in range(600):
        if notes.exists() and notes.read_text() == "aaab":
            break
        await asyncio.sleep(0.1)
    second.cancel()
    await pool.run(row(notes=str(notes)), NOWHERE, ("c",) * 2)
    assert notes.read_text() == "aaabcc", "in the one place that is free"
    until.touch()
    await first
    await pool.stop()


async def test_a_cancelled_group_gives_its_room_back(folder: Path) -> None:
    pool = await started(folder)
    task = asyncio.create_task(pool.run(row(seconds=600), NOWHERE, ("a",) * 4))
    await asyncio.sleep(0.5)
    task.cancel()
    async with asyncio.timeout(10):
        assert (await pool.run(row(), NOWHERE, ("a",) * 4)).outcomes[3].reward == 1.0
    await pool.stop()


async def test_a_program_that_does_not_import_is_the_jobs_error(folder: Path) -> None:
    with pytest.raises(JobError, match="has no function 'nobody'"):
        await started(folder, "nobody")


async def test_workers_are_added_and_retired_while_episodes_run(folder: Path) -> None:
    pool = await started(folder, episodes=1)
    until = folder / "until"
    first = asyncio.create_task(pool.run(row(until=str(until)), NOWHERE, ("a",)))
    second = asyncio.create_task(pool.run(row(until=str(until)), NOWHERE, ("bb",)))
    await asyncio.sleep(0.3)
    assert pool.waiting == 1
    await pool.scale(3)
    assert [each.name for each in pool.workers()] == ["environment-0", "environment-1", "environment-2"]
    await asyncio.sleep(0.3)
    before = pool.workers()
    assert sum(each.busy for each in before) == 2
    await pool.scale(1)
    assert pool.count == 1
    await asyncio.to_thread(wait_until_gone, {each.pid for each in before[1:] if not each.busy})
    until.touch()
    assert [(await each).outcomes[0].reward for each in (first, second)] == [1.0, 2.0], "retired workers finish"
    await asyncio.to_thread(wait_until_gone, {each.pid for each in before[1:]})
    assert pool.deaths == ()
    await pool.stop()


async def test_a_worker_that_dies_while_the_pool_shrinks_or_grows_leaves_the_wanted_number(folder: Path) -> None:
    pool = await started(folder, count=2, episodes=1)
    lost = [asyncio.create_task(pool.run(row(seconds=1), NOWHERE, ("a",))) for _ in range(2)]
    await asyncio.sleep(0.3)
    for each in pool.workers():
        os.kill(each.pid, signal.SIGKILL)
    await asyncio.gather(*lost, return_exceptions=True)
    assert pool.count == 0, "both are being replaced"
    await asyncio.gather(pool.scale(1), pool.scale(3))
    for _ in range(300):
        if pool.count == 3:
            break
        await asyncio.sleep(0.1)
    assert [each.name for each in pool.workers()] == ["environment-0", "environment-1", "environment-2"]
    pids = {each.pid for each in pool.workers()}
    await pool.stop()
    wait_until_gone(pids)


async def test_the_pool_grows_while_groups_wait_and_shrinks_when_idle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volley.pool_size.LOOK_EVERY_S", 0.2)
    monkeypatch.setattr("volley.pool_size.LOOKS_AT_REST", 3)
    pool = await started(folder, episodes=1, max_count=3)
    waiting = [asyncio.create_task(pool.run(row(seconds=2), NOWHERE, ("a",))) for _ in range(8)]
    most = 1
    while not all(task.done() for task in waiting):
        most = max(most, pool.count)
        await asyncio.sleep(0.05)
    assert most in (2, 3)
    for _ in range(100):
        if pool.count == 1:
            break
        await asyncio.sleep(0.1)
    assert pool.count == 1
    await pool.stop()


async def test_a_class_is_set_up_once_per_worker_and_closed_with_it(folder: Path) -> None:
    pool = await started(folder, "Holder", count=2)
    busy = [asyncio.create_task(pool.run(row(seconds=3), NOWHERE, ("a",) * 4)) for _ in range(2)]
    await asyncio.sleep(0.5)
    await pool.scale(1)
    await asyncio.gather(*busy)
    for _ in range(100):
        if "closed" in (notes := (folder / "holder.log").read_text().split("\n")):
            break
        await asyncio.sleep(0.1)
    assert (notes.count("set up"), notes.count("ran"), notes.count("closed")) == (2, 8, 1), "the retired worker's"
    await pool.stop()
    assert (folder / "holder.log").read_text().split("\n").count("closed") == 2


async def test_a_class_that_cannot_be_set_up_again_uses_up_replacements(folder: Path) -> None:
    with pytest.raises(WorkerDied, match="the server is away"):
        await started(folder, "Unready")
    (folder / "ready").touch()
    pool = await started(folder, "Unready", max_replacements=3)
    (folder / "ready").unlink()
    (worker,) = pool.workers()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(GroupGone):
        await pool.run(row(seconds=5), NOWHERE, ("a",))
    with pytest.raises(WorkerDied, match="the server is away"):
        await pool.run(row(), NOWHERE, ("a",))
    assert len(pool.deaths) == 4
    await pool.stop()


async def test_a_program_under_another_interpreter_dies_without_its_worker(folder: Path) -> None:
    venv.create(folder / "environment", symlinks=True)
    python = str(folder / "environment" / "bin" / "python")
    pool = await started(folder, python=python)
    assert (await pool.run(row(), NOWHERE, ("a", "bb"))).outcomes[1].reward == 2.0
    (before,) = pool.workers()
    died = await pool.run(row(die=True), NOWHERE, ("a", "b"))
    assert {each.failure for each in died.outcomes} == {"the program's process ended: it died (exit code 7)"}
    assert (await pool.run(row(), NOWHERE, ("a",))).outcomes[0].reward == 1.0
    assert (pool.deaths, pool.workers()) == ((), (before,))
    children = descendants(before.pid)
    await pool.stop()
    wait_until_gone({before.pid, *children})


async def test_a_program_that_another_interpreter_cannot_run_is_the_jobs_error(folder: Path) -> None:
    with pytest.raises(JobError, match="no/python is not an executable file"):
        await started(folder, python="no/python")
