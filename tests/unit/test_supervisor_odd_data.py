"""Passes of the supervisor over runs whose data nobody expected: they are left alone, and the others go on."""

import json
import logging
from collections.abc import Callable

import pytest

from services.store.redis import QUEUE_KEY, run_key
from services.supervisor.supervisor import SETTLED_PASSES
from tests.unit.supervisor_stage import Stage, record, set_stage
from volley.state import Desired, Observed, RunRecord

COLOCATED = {"actors": {"gpus": 0.5}, "learner": {"gpus_per_rank": 0.5}, "placement": "colocated"}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return set_stage(monkeypatch)


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
