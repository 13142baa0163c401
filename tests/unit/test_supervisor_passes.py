"""Passes of the supervisor over runs: resumed ones, reports that come meanwhile, mute drivers."""

import contextlib
import json
import math
from typing import Any

import pytest

from services.store.redis import run_key
from services.supervisor.decisions import BARREN_LIVES, MUTE_SECONDS, START_SECONDS, Look
from services.supervisor.supervisor import PASS_SECONDS, SETTLED_PASSES
from tests.unit.supervisor_stage import Stage, set_stage
from volley.errors import HostError
from volley.state import AuditRecord, Observed, Place

DELETION = AuditRecord(time=1.0, who="admin", action="delete", run="r")
GROWN = {"actors": 3, "actors_wanted": 4, "learner_ranks": 1}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return set_stage(monkeypatch)


# ---- a run that is resumed after its end ---------------------------------------------------------------------------


async def failed_for_good(stage: Stage) -> Observed:
    """Create a run that was given up after its driver was killed."""
    await stage.create()
    seen = stage.report(state="failed", problem="gave up", step=3, ended=1.0, **GROWN)
    stage.remember(count=7, step=3, barren=BARREN_LIVES, killed=True)
    stage.ray.states["r"] = "killed"
    return seen


async def test_a_resumed_run_has_not_ended_while_its_driver_starts(stage: Stage) -> None:
    ended = await failed_for_good(stage)
    await stage.passes()
    assert not stage.ray.submitted
    at_launch: list[Observed] = []
    stage.ray.during_submit = lambda run_id: at_launch.append(
        Observed.model_validate_json(stage.redis.data[run_key(run_id, "observed")])
    )
    await stage.resume()
    await stage.passes(SETTLED_PASSES)
    (seen,) = at_launch
    assert (seen.state, seen.problem, seen.ended, seen.step, seen.actors_wanted) == ("queued", "", None, 3, 0)
    assert not await stage.store.delete_if("r", ended, DELETION), "as the API saw it a moment ago"
    assert await stage.store.record("r") is not None
    assert stage.ray.submitted == [("r", 8)]
    history = stage.history()
    assert (history.barren, history.killed, history.revision) == (0, False, 1)


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_run_that_is_deleted_first_gets_no_driver_and_leaves_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    if resumed:
        await failed_for_good(stage)
        await stage.resume()
    else:
        await stage.create()
    server, moved = stage.redis, stage.store.move

    def delete() -> None:
        for key in [key for key in server.data if key.startswith(run_key("r"))]:
            del server.data[key]
        server.data["volley:runs"].pop("r")

    async def move(*args: Any) -> None:
        await moved(*args)
        server.before_execute = delete

    monkeypatch.setattr(stage.store, "move", move)
    await stage.passes(SETTLED_PASSES)
    assert not stage.ray.submitted
    assert [key for key in server.data if key.startswith(run_key("r"))] == []
    assert not await stage.store.delete_if("r", Observed(), DELETION)


async def test_a_run_is_deleted_once_while_it_is_as_it_was_seen(stage: Stage) -> None:
    ended = await failed_for_good(stage)
    assert await stage.store.delete_if("r", ended, DELETION)
    assert await stage.store.run_ids() == []
    assert [json.loads(entry["json"])["action"] for entry in stage.redis.data["volley:audit"]] == ["delete"]


@pytest.mark.parametrize("writes", range(1, 4))
async def test_a_supervisor_that_dies_between_two_writes_loses_no_resumption(stage: Stage, writes: int) -> None:
    """The writes are, in order, its lease, the run's place, and the observed state together with the history."""
    await failed_for_good(stage)
    await stage.resume()
    launched: list[str] = []
    stage.ray.during_submit = launched.append
    stage.redis.writes_left = writes
    with contextlib.suppress(HostError):
        await stage.passes()
    assert len(launched) == (writes == 3), "it dies before the driver starts, or just after"
    stage.ray.states["r"] = "killed"
    stage.ray.submitted.clear()
    stage.redis.writes_left = math.inf
    stage.take_over()
    await stage.passes(60)
    assert len(stage.ray.submitted) == 1
    assert ((await stage.observed()).state, stage.history().killed) == ("queued", False)
    assert stage.history().barren == (writes == 3), "only a driver that started counts"


async def test_submissions_rejected_by_ray_do_not_count_against_a_resumed_run(stage: Stage) -> None:
    await failed_for_good(stage)
    await stage.resume()
    refused: list[str] = []

    def refuse(run_id: str) -> None:
        refused.append(run_id)
        raise HostError("no agent is up")

    stage.ray.during_submit = refuse
    await stage.passes(3 * BARREN_LIVES)
    assert len(refused) == 3 * BARREN_LIVES
    assert (await stage.observed()).state == "queued"
    stage.ray.during_submit = lambda run_id: None
    await stage.passes()
    for _ in range(BARREN_LIVES - 1):
        stage.ray.states["r"] = "ended"
        await stage.passes(40)
    assert len(stage.ray.submitted) == BARREN_LIVES
    stage.ray.states["r"] = "ended"
    await stage.passes(40)
    assert (len(stage.ray.submitted), (await stage.observed()).state) == (BARREN_LIVES, "failed")


async def test_killed_drivers_that_report_a_failure_are_counted_though_the_run_is_shown_as_queued(
    stage: Stage,
) -> None:
    await stage.create()
    for life in range(1, BARREN_LIVES + 1):
        await stage.passes(40)
        assert len(stage.ray.submitted) == life
        assert (await stage.observed()).state == "queued"
        stage.report(state="failed", problem="lost its actors", ended=1.0)
        stage.ray.states["r"] = "killed"
    await stage.passes(40)
    seen = await stage.observed()
    assert (len(stage.ray.submitted), seen.state) == (BARREN_LIVES, "failed")
    assert "in a row" in seen.problem


# ---- reports of a driver that ends while the supervisor looks ------------------------------------------------------


async def test_the_last_report_of_a_driver_that_just_ended_is_what_counts(stage: Stage) -> None:
    await stage.create()
    stage.report(state="running", step=9)
    stage.ray.states["r"] = "ended"

    def report_once(_run_id: str) -> None:
        stage.report(state="failed", problem="no signal left", step=9, ended=2.0)
        stage.ray.during_status = lambda run_id: None

    stage.ray.during_status = report_once
    await stage.passes(2 * SETTLED_PASSES)
    assert not stage.ray.submitted
    assert (await stage.observed()).problem == "no signal left"


@pytest.mark.parametrize("stopped", [False, True], ids=["to be started again", "to be stopped"])
async def test_a_report_that_arrives_late_is_not_overwritten(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    await stage.create()
    stage.report(state="running", step=9)
    stage.remember(count=1)
    stage.ray.states["r"] = "ended"
    await stage.store.change_desired("r", lambda desired: desired.model_copy(update={"stopped": stopped}))
    act = stage.supervisor._act

    async def acting(look: Look, place: Place | None) -> None:
        stage.redis.before_execute = lambda: stage.report(state="done", step=10, ended=2.0)
        await act(look, place)

    monkeypatch.setattr(stage.supervisor, "_act", acting)
    await stage.passes()
    assert ((await stage.observed()).state, (await stage.observed()).step) == ("done", 10)
    assert not stage.ray.submitted


async def test_a_run_that_ends_without_a_driver_has_no_workers(stage: Stage) -> None:
    await stage.create()
    stage.report(state="running", step=9, **GROWN)
    stage.ray.states["r"] = "ended"
    await stage.store.change_desired("r", lambda desired: desired.model_copy(update={"stopped": True}))
    await stage.passes()
    seen = await stage.observed()
    assert (seen.state, seen.step, seen.revision, seen.ended is not None) == ("stopped", 9, 1, True)
    assert {getattr(seen, name) for name in GROWN} == {0}


async def test_a_driver_to_come_reserves_what_its_job_says(stage: Stage) -> None:
    """However many actors the last one had given itself."""
    await stage.create(actors={"count": 1, "max_count": 6, "gpus": 1})
    stage.report(state="running", **GROWN)
    stage.ray.states["r"] = "alive"
    await stage.passes()
    assert (await stage.store.places())["r"].resources["GPU"] == 4
    stage.ray.states["r"] = "killed"
    await stage.passes()
    assert (await stage.store.places())["r"].resources["GPU"] == 1


# ---- mute drivers --------------------------------------------------------------------------------------------------


async def live(stage: Stage) -> None:
    await stage.create()
    await stage.passes()
    assert stage.ray.submitted == [("r", 1)]
    stage.report(state="running")


async def test_a_mute_driver_is_killed(stage: Stage) -> None:
    await live(stage)
    await stage.passes(int(MUTE_SECONDS / PASS_SECONDS))
    assert not stage.ray.stopped
    await stage.passes(2)
    assert stage.ray.stopped
    assert stage.history().killed


async def test_a_driver_that_reports_lives_whatever_its_clock_says(stage: Stage) -> None:
    await live(stage)
    for beat in range(int(START_SECONDS / 5)):
        stage.report(state="running", updated=5.0 + beat)
        await stage.passes(1, 10.0)
    assert not stage.ray.stopped


async def test_nobody_is_killed_because_the_supervisor_was_suspended_or_replaced(stage: Stage) -> None:
    await live(stage)
    for seconds in (3600.0, 90_000.0):
        stage.report(state="running")
        await stage.passes(20)
        await stage.passes(1, seconds)
    await stage.passes(5)
    stage.take_over()
    await stage.passes(int(MUTE_SECONDS / PASS_SECONDS))
    assert not stage.ray.stopped


async def test_nobody_is_killed_because_redis_was_away(stage: Stage) -> None:
    await live(stage)
    await stage.passes(5)
    stage.redis.is_away = lambda name: name == "mget"
    for _ in range(30):
        with pytest.raises(HostError):
            await stage.passes()
    stage.redis.is_away = lambda name: False
    await stage.passes(20)
    assert not stage.ray.stopped


async def test_a_mute_driver_is_killed_even_if_passes_take_long(stage: Stage) -> None:
    """As while each submission of another run's driver takes a minute to fail."""
    await live(stage)
    await stage.passes(8, 62.0)
    assert stage.ray.stopped
