"""Passes of the supervisor over runs in a Redis in memory, with a Ray that the tests control."""

import contextlib
import json
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.store.redis import QUEUE_KEY, Store, run_key
from services.supervisor import supervisor as module
from services.supervisor.decisions import BARREN_LIVES, MUTE_SECONDS, START_SECONDS, DriverHistory, Look
from services.supervisor.ray_jobs import JobStatus
from services.supervisor.supervisor import LIVES_KEY, PASS_SECONDS, SETTLED_PASSES, RunWatch, Supervisor
from tests.unit.fake_redis import FakeRedis, serve
from volley.errors import HostError
from volley.job import JOB
from volley.state import AuditRecord, Desired, Observed, Place, RunRecord

DELETION = AuditRecord(time=1.0, who="admin", action="delete", run="r")
GROWN = {"actors": 3, "actors_wanted": 4, "learner_ranks": 1}


class FakeRay:
    """A launcher whose drivers do what a test says.

    Attributes:
        states: of the last driver of each run.
        submitted: the drivers that were started.
        during_submit: called with the run while its driver starts; may raise.
        during_status: called with the run when its driver's state is asked for.
    """

    def __init__(self) -> None:
        self.states: dict[str, JobStatus] = {}
        self.submitted: list[tuple[str, int]] = []
        self.stopped: list[str] = []
        self.during_submit: Callable[[str], None] = lambda run_id: None
        self.during_status: Callable[[str], None] = lambda run_id: None

    async def submit(self, run_id: str, life: int, grace_s: float) -> None:
        self.during_submit(run_id)
        self.submitted.append((run_id, life))
        self.states[run_id] = "alive"

    async def status(self, run_id: str) -> JobStatus:
        state = self.states.get(run_id, "none")
        self.during_status(run_id)
        return state

    async def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)

    async def logs(self, run_id: str, tail_bytes: int) -> str:
        return ""


class Clock:
    """What the supervisor takes the time for."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        self.now += 0.001  # no two reports have the same time
        return self.now

    def monotonic(self) -> float:
        return self.now


class Stage:
    """A supervisor and its servers."""

    def __init__(self, redis: FakeRedis, clock: Clock) -> None:
        self.redis, self.ray, self.clock = redis, FakeRay(), clock
        self.store = Store("", retries=0)
        self.nodes: list[dict[str, float]] | None = None
        self.supervisor = Supervisor(self.store, self.ray, "", self.cluster)

    def take_over(self, watch: RunWatch | None = None) -> None:
        """Let another supervisor go on."""
        self.redis.data.pop("volley:lease:supervisor", None)
        self.supervisor = Supervisor(self.store, self.ray, "", self.cluster, watch)

    async def cluster(self) -> list[dict[str, float]] | None:
        return self.nodes

    async def passes(self, count: int = 1, seconds: float = PASS_SECONDS) -> None:
        for _ in range(count):
            self.clock.now += seconds
            assert await self.supervisor._has_lease()
            await self.supervisor.check_runs()

    async def create(self, run_id: str = "r", **job: Any) -> None:
        await self.store.create(record(run_id, **job))

    def report(self, run_id: str = "r", /, **fields: Any) -> Observed:
        """Write what a driver would."""
        seen = Observed.model_validate({"updated": self.clock.time(), **fields})
        self.redis.data[run_key(run_id, "observed")] = seen.model_dump_json()
        return seen

    def remember(self, run_id: str = "r", **history: Any) -> None:
        text = DriverHistory.model_validate(history).model_dump_json()
        self.redis.data.setdefault(LIVES_KEY, {})[run_id] = text

    def history(self, run_id: str = "r") -> DriverHistory:
        return DriverHistory.model_validate_json(self.redis.data[LIVES_KEY][run_id])

    async def resume(self, run_id: str = "r") -> None:
        await self.store.change_desired(run_id, lambda desired: desired.model_copy(update={"stopped": False}))

    async def observed(self, run_id: str = "r") -> Observed:
        return await self.store.observed(run_id)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(time=clock.time, monotonic=clock.monotonic))
    return Stage(serve(monkeypatch), clock)


def record(run_id: str = "r", **job: Any) -> RunRecord:
    tree = {
        "kind": "rl",
        "name": run_id,
        "steps": 1,
        "model": {"path": "/nowhere"},
        "data": {"path": "/nowhere.jsonl"},
        "scorer": {"kind": "exact"},
        "objective": {"kind": "mean"},
        **job,
    }
    resolved = JOB.validate_python(tree).model_dump(mode="json")
    return RunRecord(id=run_id, name=run_id, kind="rl", job=resolved, created=1.0, folder="/nowhere")


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
    """It dies after so many writes: its lease, the place, and the observed state with the history."""
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


# ---- data that nobody expected -------------------------------------------------------------------------------------

COLOCATED = {"actors": {"gpus": 0.5}, "learner": {"gpus_per_rank": 0.5}, "placement": "colocated"}


def unreadable(part: str) -> Callable[[Stage], None]:
    def spoil(stage: Stage) -> None:
        stage.redis.data[run_key("odd", part)] = '{"of": "another release"}'

    return spoil


def impossible_desired(stage: Stage) -> None:
    stage.redis.data[run_key("odd", "desired")] = Desired(revision=1, actors=3).model_dump_json()


def odd_checkpoint(stage: Stage) -> None:
    spoilt = record("odd", **COLOCATED).model_dump()
    spoilt["job"]["checkpoint"] = "often"
    stage.redis.data[run_key("odd")] = json.dumps(spoilt)


def odd_ray_job(stage: Stage) -> None:
    def status(run_id: str) -> None:
        if run_id == "odd":
            raise ValueError("invalid literal for int() with base 10: 'x'")

    stage.ray.during_status = status


ODD = [unreadable(""), unreadable("desired"), unreadable("observed"), impossible_desired, odd_checkpoint, odd_ray_job]


@pytest.mark.parametrize("spoil", ODD)
async def test_a_run_whose_data_cannot_be_used_is_left_alone_and_the_others_go_on(
    stage: Stage, spoil: Callable[[Stage], None], caplog: pytest.LogCaptureFixture
) -> None:
    await stage.create("odd", **COLOCATED)
    await stage.create("r")
    spoil(stage)
    await stage.passes(2 * SETTLED_PASSES)
    assert stage.ray.submitted == [("r", 1)]
    assert stage.history().count == 1
    (logged,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "run odd: it is left alone" in logged.message


async def test_a_run_that_is_left_alone_keeps_its_place_and_goes_on_when_its_data_are_mended(stage: Stage) -> None:
    await stage.create("odd", **COLOCATED)
    await stage.passes()
    before = (await stage.store.places())["odd"]
    assert before.state == "admitted"
    stage.ray.states["odd"] = "ended"
    impossible_desired(stage)
    await stage.passes(2 * SETTLED_PASSES)
    assert (await stage.store.places())["odd"] == before
    assert len(stage.ray.submitted) == 1
    await stage.store.change_desired("odd", lambda desired: desired.model_copy(update={"actors": None}))
    await stage.passes(5)
    assert len(stage.ray.submitted) == 2


async def test_what_a_run_that_is_left_alone_reserves_is_not_given_to_others(stage: Stage) -> None:
    stage.nodes = [{"GPU": 1.0, "CPU": 8.0}]
    await stage.create("odd", **COLOCATED)
    await stage.passes()
    impossible_desired(stage)
    await stage.create("r", **COLOCATED)
    await stage.passes(2 * SETTLED_PASSES)
    assert stage.ray.submitted == [("odd", 1)]
    assert (await stage.observed("r")).problem == "place 1 in the queue: waits for 1 GPU: odd holds 1"


async def test_a_run_that_is_left_alone_while_it_waits_keeps_its_turn(stage: Stage) -> None:
    stage.nodes = [{"GPU": 1.0, "CPU": 8.0}]
    await stage.create("r", **COLOCATED)
    await stage.passes()
    await stage.create("odd", **COLOCATED)
    await stage.passes()
    before = (await stage.store.places())["odd"]
    assert before.state == "waiting"
    impossible_desired(stage)
    await stage.passes(2 * SETTLED_PASSES)
    assert (await stage.store.places())["odd"] == before


async def test_an_ended_run_whose_data_cannot_be_used_is_logged_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.create("odd")
    stage.report("odd", state="done", ended=1.0)
    await stage.passes(SETTLED_PASSES)
    unreadable("observed")(stage)
    await stage.passes(4 * SETTLED_PASSES)
    assert len([each for each in caplog.records if each.levelno >= logging.ERROR]) == 1


async def test_a_place_that_cannot_be_read_is_given_anew_or_removed(stage: Stage) -> None:
    await stage.create()
    stage.redis.data[QUEUE_KEY] = {"r": "{}", "gone": "{}"}
    await stage.passes()
    assert list(await stage.store.places()) == ["r"]
    assert stage.ray.submitted == [("r", 1)]


@pytest.mark.parametrize("done", [False, True])
async def test_a_run_whose_rows_confuse_its_webhooks_is_supervised_nevertheless(
    stage: Stage, caplog: pytest.LogCaptureFixture, done: bool
) -> None:
    class Confused:
        async def look(self, record: RunRecord, observed: Observed, *, final: bool) -> None:
            raise KeyError("step")

    stage.take_over(Confused())
    await stage.create()
    if done:
        stage.report(state="done")
    await stage.passes(21)
    assert stage.ray.submitted == ([] if done else [("r", 1)])
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == [
        "run r: its webhooks hear nothing, because its data cannot be used"
    ]
