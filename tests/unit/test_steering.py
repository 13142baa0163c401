"""Steering: which copy of the desired state is applied, when, and what is reported of one that is impossible."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from services.control import steering
from services.control.steering import Steering
from services.coordinator.loop import Coordinator
from services.recording.display import Display
from services.recording.recorder import RunRecorder
from services.store.desired import change, change_in_folder, read_desired, write_desired
from tests.unit.fake_roles import FakeActors, coordinator, job, until
from tests.unit.fake_runs import FakeOutbox, SmallFolder, no_space
from volley.errors import HostError
from volley.state import Desired


@dataclass
class FakeStore:
    """A Redis that can be away."""

    kept: Desired = field(default_factory=Desired)
    away: bool = False

    async def desired(self, _run_id: str) -> Desired:
        if self.away:
            raise HostError("Redis does not answer")
        return self.kept

    async def change_desired(self, _run_id: str, change: Callable[[Desired], Desired], _audit: object) -> Desired:
        self.kept = change(self.kept)
        return self.kept

    def change(self, **changes: Any) -> None:
        self.kept = change(self.kept, job(), changes)


@dataclass
class FakePool:
    """A role with one process."""

    count: int = 1
    version: int = 0
    deaths: tuple[Any, ...] = ()
    sandbox: str = ""

    def workers(self) -> tuple[Any, ...]:
        return ()

    async def scale(self, count: int) -> None:
        self.count = count


@dataclass
class Steered:
    """A run that is steered every few milliseconds."""

    folder: SmallFolder
    store: FakeStore
    steering: Steering
    coordinator: Coordinator
    outbox: FakeOutbox

    @property
    def problem(self) -> str:
        return self.steering.view()["problem"]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.outbox.events]

    async def applied(self, revision: int) -> None:
        await until(lambda: self.coordinator.desired.revision == revision)

    async def polled(self) -> None:
        """Return after it has looked for changes."""
        await asyncio.sleep(0.05)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Steered]:
    monkeypatch.setattr(steering, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(steering, "LAST_EVENTS_SECONDS", 0.1)
    folder, store, outbox, pool = SmallFolder(tmp_path), FakeStore(), FakeOutbox(), FakePool()
    recorder = RunRecorder(folder, outbox, Display(quiet=True), samples_kept=0)  # type: ignore[arg-type]
    pools: dict[str, Any] = {"actors": pool, "rewards": FakePool(), "environments": FakePool(0)}
    made = Steering(job(), folder, store, recorder, **pools, desired=Desired())  # type: ignore[arg-type]
    steered, *_ = coordinator(job(), FakeActors(random.Random(0)))
    steered.hooks = replace(steered.hooks, recorder=recorder)
    async with made.running():
        made.steer(steered, None)  # type: ignore[arg-type]
        yield Steered(folder, store, made, steered, outbox)


async def test_a_change_in_the_folder_or_in_redis_is_applied_and_copied(run: Steered) -> None:
    change_in_folder(run.folder, job(), {"max_lag": 1})
    await run.applied(1)
    assert run.store.kept == run.coordinator.desired
    run.store.change(learning_rate=0.5)
    await run.applied(2)
    assert (read_desired(run.folder).learning_rate, run.coordinator.desired.max_lag) == (0.5, 1)


async def test_a_file_that_is_invalid_is_no_trouble_once_it_is_repaired(run: Steered) -> None:
    change_in_folder(run.folder, job(), {"max_lag": 1})
    await run.applied(1)
    file = run.folder.path / "desired.json"
    whole = file.read_bytes()
    file.write_text("{}}")
    await until(lambda: "cannot be applied" in run.problem)
    file.write_bytes(whole)
    await until(lambda: not run.problem)


async def test_an_impossible_state_is_reported_once_until_it_is_replaced(run: Steered) -> None:
    impossible = Desired(revision=1, objective={"k": 99})
    write_desired(run.folder, impossible)
    await until(lambda: "cannot be applied: objective: " in run.problem)
    await run.polled()
    assert run.kinds() == ["trouble"]
    run.store.kept = Desired(revision=2)
    await run.applied(2)
    assert not run.problem


async def test_an_older_copy_is_not_applied_and_is_replaced(run: Steered, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's copy of a change fails on a full disk, Redis is away, and comes back as it was long before."""

    def full(*_: object) -> None:
        raise no_space()

    with monkeypatch.context() as disk:
        disk.setattr("services.store.desired.write_desired", full)
        run.store.change(actors=1)
        run.store.change(paused=True)
        await run.applied(2)
        run.store.away = True
        await run.polled()
        assert run.coordinator.desired.paused
    run.store.away, run.store.kept = False, Desired()
    await until(lambda: run.store.kept.paused and read_desired(run.folder).paused)
    run.store.change(paused=False)
    await run.applied(3)
    assert (run.coordinator.desired.actors, run.coordinator.desired.paused) == (1, False)


async def test_a_change_of_a_restored_redis_that_counts_the_same_revision_is_applied(run: Steered) -> None:
    change_in_folder(run.folder, job(), {"max_lag": 1})
    await run.applied(1)
    run.store.kept = Desired(revision=1, paused=True)
    await until(lambda: run.coordinator.desired.paused)
    assert read_desired(run.folder) == run.store.kept


async def test_changes_are_applied_while_the_disk_is_full(run: Steered) -> None:
    run.folder.full.append(True)
    run.store.change(objective={"k": 3})
    await run.applied(1)
    run.store.change(stopped=True)
    await run.applied(2)
    assert (run.steering.view()["revision"], run.steering.view()["state"]) == (2, "stopping")
    run.folder.full.clear()
    await until(lambda: run.kinds().count("desired_changed") == 2)
    (changed,) = (event for event in run.outbox.events if event["kind"] == "objective_changed")
    assert (changed["step"], changed["objective"]["k"]) == (0, 3)
