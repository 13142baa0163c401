"""Parts of a run that need no process: the initial counts of its roles, and its final state."""

import asyncio

import pytest
from pydantic import ValidationError

from services.jobs.needs import with_desired_counts
from services.runs.run import _outcome
from volley.errors import JobError, RunStopped
from volley.job import RLJob
from volley.state import Desired


def job() -> RLJob:
    return RLJob.model_validate(
        {
            "name": "fake",
            "steps": 3,
            "model": {"path": "m"},
            "data": {"path": "d"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "mean"},
            "actors": {"count": 2, "cpus": 3},
        }
    )


def test_a_run_starts_with_the_currently_desired_counts() -> None:
    assert with_desired_counts(job(), Desired()) == job()
    sized = with_desired_counts(job(), Desired(actors=5, reward_workers=4, environment_workers=2))
    assert (sized.actors.count, sized.actors.cpus, sized.reward_workers.count) == (5, 3, 4)
    assert sized.environment_workers.count == 2


def test_a_run_may_start_without_actors_although_no_job_can_request_that() -> None:
    assert with_desired_counts(job(), Desired(actors=0)).actors.count == 0
    with pytest.raises(ValidationError):
        RLJob.model_validate({**job().model_dump(), "actors": {"count": 0}})


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, ("done", "")),
        (RunStopped(), ("stopped", "stopped by its user")),
        (asyncio.CancelledError(), ("stopped", "stopped by its user")),
        (JobError("no data"), ("failed", "no data")),
        (KeyError("k"), ("failed", "unexpected KeyError: 'k'")),
        (SystemExit(1), ("failed", "ended by an unexpected error")),
    ],
    ids=["its end", "its user", "a signal", "an error", "a bug", "an exit"],
)
def test_the_final_state_follows_from_how_the_run_ended(error: BaseException | None, outcome: tuple[str, str]) -> None:
    assert _outcome(error) == outcome
