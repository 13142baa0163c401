"""Custom Ray resources: how a job says on which nodes its roles may be placed."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.needs import needs_of
from volley.job import JOB, RLJob


def job(**changes: Any) -> RLJob:
    made = JOB.validate_python(
        {
            "kind": "rl",
            "name": "placed",
            "steps": 1,
            "model": {"path": "nowhere"},
            "data": {"path": "nowhere.jsonl"},
            "scorer": {"kind": "exact"},
            "objective": {"kind": "mean"},
            **changes,
        }
    )
    assert isinstance(made, RLJob)
    return made


def test_what_the_roles_reserve_is_summed_by_name() -> None:
    placed = job(
        actors={"count": 3, "resources": {"volley_actor": 1, "fast_disk": 0.5}},
        reward_workers={"count": 4, "resources": {"volley_reward": 0.25}},
        learner={"ranks": 2, "resources_per_rank": {"volley_learner": 1, "fast_disk": 1}},
    )
    assert needs_of(placed).custom == {"volley_actor": 3, "fast_disk": 3.5, "volley_reward": 1, "volley_learner": 2}
    assert needs_of(job()).custom == {}


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"GPU": 1}, "GPU is not a custom resource"),
        ({"volley_actor": 0}, "greater than 0"),
        ({"": 1}, "at least 1 character"),
    ],
)
def test_resources_that_ray_would_refuse_are_refused_first(resources: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(actors={"resources": resources})
