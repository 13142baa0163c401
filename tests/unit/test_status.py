"""The observed state of a run: typed updates, validated, with the newest change on top."""

import typing

import pytest
from pydantic import ValidationError

from services.control.heartbeat import ObservedUpdate, Status
from volley.state import Observed


class FakeOutbox:
    def __init__(self) -> None:
        self.reported: list[Observed] = []

    def observed(self, observed: Observed) -> None:
        self.reported.append(observed)


def status(before: Observed | None = None) -> tuple[Status, FakeOutbox]:
    outbox = FakeOutbox()
    return Status(outbox, before or Observed()), outbox  # type: ignore[arg-type]


def test_an_update_has_the_fields_of_the_observed_state_with_their_types() -> None:
    observed = {name: field.annotation for name, field in Observed.model_fields.items()}
    assert typing.get_type_hints(ObservedUpdate) == observed


def test_changes_take_precedence_over_the_source_and_are_reported_at_once() -> None:
    made, outbox = status(Observed(life=2, step=7, checkpoint=5))
    made.source = lambda: {"state": "running", "step": 8}
    made.set(state="pending", problem="waits")
    (reported,) = outbox.reported
    assert (reported.state, reported.problem, reported.step) == ("pending", "waits", 8)
    assert (reported.life, reported.checkpoint) == (3, 5), "what an earlier driver reported stays"
    assert reported.updated > 0


def test_an_invalid_value_is_rejected() -> None:
    made, outbox = status()
    with pytest.raises(ValidationError, match="state"):
        made.set(state="walking")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="steps_done"):
        made.set(steps_done=3)  # type: ignore[call-arg]
    assert not outbox.reported


def test_a_pause_ends_in_the_state_before_it_or_in_one_that_was_reported_meanwhile() -> None:
    made, _ = status()
    made.set(state="pending")
    made.pause("the disk is full")
    made.pause("it still is")
    made.pause("")
    assert (made.observed.state, made.observed.problem) == ("pending", "")
    made.pause("the disk is full")
    made.set(state="running", problem="slow")
    made.pause("")
    assert (made.observed.state, made.observed.problem) == ("running", "slow")


def test_the_final_state_reports_nothing_in_flight() -> None:
    made, outbox = status()
    made.source = lambda: {"groups": {"ready": 3}, "actors": 2, "actors_wanted": 4, "learner_ranks": 1}
    made.set(state="running")
    made.end("failed", "why")
    assert (outbox.reported[-1].state, outbox.reported[-1].problem) == ("failed", "why")
    last = outbox.reported[-1]
    assert (last.groups, last.actors, last.actors_wanted, last.learner_ranks) == ({}, 0, 0, 0)
    assert outbox.reported[-1].ended is not None
