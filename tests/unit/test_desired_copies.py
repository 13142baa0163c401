"""The two copies of a run's desired state: in its run folder and in Redis."""

import asyncio
import errno
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.control import steering as module
from services.control.steering import Steering
from services.store.desired import DesiredCopies, combined, read_desired, write_desired
from services.store.folder import RunFolder
from services.store.redis import Store, run_key
from services.tasks import cancel_all
from tests.unit.fake_redis import FakeRedis, serve
from tests.unit.fake_roles import job, until
from volley.state import Desired

KNOWN = Desired(revision=4, actors=2, max_lag=1, priority=3)


class Copies:
    """Both copies, as the run's driver sees them."""

    def __init__(self, redis: FakeRedis, folder: Path) -> None:
        self.redis, self.folder, self.store = redis, RunFolder(folder), Store("", retries=0)
        self.write(KNOWN)
        write_desired(self.folder, KNOWN)
        self.driver = DesiredCopies(self.folder, self.store, KNOWN)

    def write(self, desired: Desired) -> None:
        """Change the copy in Redis."""
        self.redis.data[run_key(self.folder.run_id, "desired")] = desired.model_dump_json()

    async def newest(self) -> Desired:
        """The state that the driver gets; both copies must then have it."""
        newest = await self.driver.newest()
        assert read_desired(self.folder) == await self.store.desired(self.folder.run_id) == newest
        return newest

    @property
    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(entry["json"])["details"] for entry in self.redis.data.get("volley:audit", ())]


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(serve(monkeypatch), tmp_path)


def changed(revision: int, **fields: Any) -> Desired:
    return KNOWN.model_copy(update={"revision": revision, **fields})


async def test_the_copy_that_was_changed_is_copied_to_the_other(copies: Copies) -> None:
    assert await copies.newest() == KNOWN
    copies.write(changed(5, actors=3))
    assert (await copies.newest()).actors == 3
    write_desired(copies.folder, changed(6, actors=4))
    assert (await copies.newest()).actors == 4
    assert copies.audit == [{"actors": 4}]


@pytest.mark.parametrize("ahead", [(5, 5), (5, 7), (7, 5)], ids=["equal", "Redis ahead", "the folder ahead"])
async def test_changes_of_both_copies_at_once_both_apply(copies: Copies, ahead: tuple[int, int]) -> None:
    local, stored = ahead
    write_desired(copies.folder, changed(local, actors=8))
    copies.write(changed(stored, stopped=True))
    newest = await copies.newest()
    assert (newest.actors, newest.stopped, newest.revision) == (8, True, max(ahead) + 1)
    assert copies.audit == [{"actors": 8}]
    assert await copies.newest() == newest


def is_past(steering: Steering, revision: int) -> bool:
    return steering.desired.revision > revision


async def test_a_live_run_applies_both(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    pool: Any = SimpleNamespace(deaths=())
    recorder: Any = None
    steering = Steering(
        job(steps=9),
        copies.folder,
        copies.store,
        recorder,
        actors=pool,
        rewards=pool,
        environments=pool,
        desired=await copies.newest(),
    )
    polling = asyncio.create_task(steering._poll())
    for actors in (5, 7):
        before = steering.desired
        later = before.model_copy(update={"revision": before.revision + 1})
        write_desired(copies.folder, later.model_copy(update={"actors": actors}))
        copies.write(later.model_copy(update={"max_lag": actors}))
        await until(partial(is_past, steering, later.revision))
        assert (steering.desired.actors, steering.desired.max_lag) == (actors, actors)
    await cancel_all((polling,))


async def test_equal_revisions_of_unknown_origin_are_resolved_once(copies: Copies) -> None:
    """As when a driver starts: the folder's copy applies, and the audit says so."""
    copies.driver = DesiredCopies(copies.folder, copies.store)
    write_desired(copies.folder, changed(5, actors=8))
    copies.write(changed(5, max_lag=2))
    newest = await copies.newest()
    assert (newest.actors, newest.max_lag, newest.revision) == (8, 1, 6)
    assert copies.audit == [{"actors": 8, "max_lag": 1}]
    assert await copies.newest() == newest


async def test_a_change_through_the_service_at_that_moment_is_not_lost(copies: Copies) -> None:
    write_desired(copies.folder, changed(5, actors=8))
    copies.redis.before_execute = lambda: copies.write(changed(5, stopped=True))
    newest = await copies.newest()
    assert (newest.actors, newest.stopped) == (8, True)


async def test_a_change_in_the_folder_at_that_moment_is_not_lost(copies: Copies) -> None:
    copies.write(changed(5, stopped=True))

    def change_folder(_name: str) -> bool:
        write_desired(copies.folder, changed(5, actors=8))
        return False

    copies.redis.is_away = change_folder
    newest = await copies.driver.newest()
    assert (newest.actors, newest.stopped) == (8, True)
    copies.redis.is_away = lambda name: False
    assert await copies.newest() == newest


async def test_a_rejected_change_is_not_revived_by_the_next(copies: Copies) -> None:
    copies.write(changed(5, actors=9_999))
    await copies.newest()
    copies.write(changed(6, actors=3))
    assert (await copies.newest()).actors == 3


@pytest.mark.parametrize("in_folder", [1, 2, 3])
@pytest.mark.parametrize("in_redis", [1, 2, 3])
async def test_changes_during_an_outage_all_apply_after_it(copies: Copies, in_folder: int, in_redis: int) -> None:
    """Only the driver cannot reach Redis. What it has applied meanwhile is not what both copies had."""
    copies.redis.is_away = lambda name: True
    for number in range(1, in_folder + 1):
        write_desired(copies.folder, changed(4 + number, actors=10 + number))
        assert (await copies.driver.newest()).actors == 10 + number
    copies.redis.is_away = lambda name: False
    copies.write(changed(4 + in_redis, stopped=True))
    newest = await copies.newest()
    assert (newest.actors, newest.stopped) == (10 + in_folder, True)


async def test_a_change_in_the_folder_that_misses_those_in_redis_reverts_none(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the folder keeps what it had, and its next change is made to that."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("services.store.desired.write_desired", full)
        copies.write(changed(5, stopped=True))
        assert (await copies.driver.newest()).stopped
    write_desired(copies.folder, changed(5, actors=8))
    newest = await copies.newest()
    assert (newest.actors, newest.stopped) == (8, True)


def test_the_folder_does_not_change_the_priority() -> None:
    assert combined(changed(9, priority=10), changed(5, priority=-1), None).priority == -1
    assert combined(changed(5, priority=10, actors=1), changed(5, priority=-1, actors=2), KNOWN).priority == -1
    assert combined(changed(5, priority=10), changed(5, priority=-1), KNOWN) == changed(5, priority=-1)
