"""Changes of runs that come together: none passes a limit that both of them would exceed."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from services.api.app import create_app
from services.api.auth import Principal, Tokens
from services.api.settings import ApiSettings
from services.jobs.needs import resources_of
from services.supervisor.claims import largest
from tests.unit.api.job_tree import job_tree
from volley.job import JOB
from volley.state import Desired, Limits, Observed, Place, RunRecord

JOB_TREE = job_tree()
HELD = resources_of(largest(JOB.validate_python(JOB_TREE), Desired()))
ALICE = Principal("alice", "operate", Limits(priority=1))


class Shelf:
    """Redis with two runs of Alice's; every call lets others go first."""

    def __init__(self, cpus: float) -> None:
        self.wanted = {"one": Desired(), "two": Desired()}
        self._limits = Limits(cpus=cpus)

    async def read_runs(
        self, run_ids: Sequence[str], unreadable: object = None
    ) -> list[tuple[RunRecord, Desired, Observed]]:
        await asyncio.sleep(0)
        return [
            (
                RunRecord(id=run, name="a", kind="rl", job=JOB_TREE, created=1.0, folder="/r", owner="alice"),
                self.wanted[run],
                Observed(state="running"),
            )
            for run in run_ids
        ]

    async def desired(self, run_id: str) -> Desired:
        await asyncio.sleep(0)
        return self.wanted[run_id]

    async def limits(self) -> dict[str, Limits]:
        await asyncio.sleep(0)
        return {"alice": self._limits}

    async def places(self, unreadable: object) -> dict[str, Place]:
        """As the supervisor wrote them before the changes."""
        await asyncio.sleep(0)
        common: dict[str, Any] = {"owner": "alice", "priority": 0, "submitted": 1.0, "since": 1.0, "state": "admitted"}
        return {run: Place(run=run, resources=HELD, most=HELD, **common) for run in self.wanted}

    async def change_desired(self, run_id: str, change: Callable[[Desired], Desired], _: object) -> Desired:
        await asyncio.sleep(0)
        self.wanted[run_id] = change(self.wanted[run_id])
        return self.wanted[run_id]


async def patched(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, dict[str, Any]]) -> list[int]:
    """The statuses of changes that Alice makes at once."""

    async def alice(*_: object) -> Principal:
        return ALICE

    monkeypatch.setattr(Tokens, "principal", alice)
    app = create_app(ApiSettings.model_validate({"redis_url": "redis://127.0.0.1:1", "admin_token": "x" * 16}))
    app.state.context.store = shelf
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers={"Authorization": "Bearer x"}
    ) as http:
        answers = await asyncio.gather(*(http.patch(f"/v1/runs/{run}", json=change) for run, change in changes))
    return sorted(answer.status_code for answer in answers)


@pytest.mark.parametrize(
    "changes",
    [
        [("one", {"actors": 5}), ("two", {"actors": 5})],
        [("one", {"actors": 5}), ("one", {"reward_workers": 40})],
    ],
)
async def test_changes_that_come_together_do_not_exceed_a_quota(
    changes: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(2 * HELD["CPU"] + 6)
    statuses = await patched(shelf, monkeypatch, *changes)
    assert statuses[0] == 200
    assert statuses[-1] == 409
    job = JOB.validate_python(JOB_TREE)
    assert sum(resources_of(largest(job, wish))["CPU"] for wish in shelf.wanted.values()) <= 2 * HELD["CPU"] + 6
    (later,) = await patched(shelf, monkeypatch, ("two", {"actors": 9}))
    assert later == 409, "the supervisor has not written the queue since"


async def test_a_change_that_scales_nothing_needs_no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator may have lowered the quota below what the run holds."""
    assert await patched(Shelf(0.5), monkeypatch, ("one", {"max_lag": 2})) == [200]
    assert await patched(Shelf(0.5), monkeypatch, ("one", {"actors": 2})) == [409]


async def test_a_priority_that_was_lowered_meanwhile_is_not_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(100)
    shelf.wanted["one"] = Desired(priority=9)
    read = shelf.read_runs

    async def then_lowered(run_ids: Sequence[str], unreadable: object) -> list[tuple[RunRecord, Desired, Observed]]:
        found = await read(run_ids, unreadable)
        shelf.wanted["one"] = Desired(priority=0)
        return found

    monkeypatch.setattr(shelf, "read_runs", then_lowered)
    assert await patched(shelf, monkeypatch, ("one", {"priority": 9})) == [403]
    assert shelf.wanted["one"].priority == 0
