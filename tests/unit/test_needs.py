"""Custom Ray resources: how a job says on which nodes its roles may be placed."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.local_ray import can_grow
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


@pytest.mark.parametrize(
    ("types", "grows"),
    [
        (set(), False),
        ({"node_" + "0f" * 28, "9e" * 28}, False),  # as Ray calls nodes that nobody manages
        ({"headgroup"}, True),
        ({"ray.head.default", "node_" + "0f" * 28}, True),
    ],
)
def test_a_cluster_with_named_kinds_of_nodes_can_grow(types: set[str], grows: bool) -> None:
    assert can_grow(types) is grows


def test_all_gpus_of_an_engine_are_asked_for_in_one_piece() -> None:
    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    placed = job(actors={"count": 3, "cpus": 1, "gpus": 4, "engine": engine})
    assert [dict(each) for each in needs_of(placed).processes if "GPU" in each] == [{"CPU": 1, "GPU": 4}] * 3


@pytest.mark.parametrize(
    ("actors", "message"),
    [
        ({"engine": {"tensor_parallel_size": 2}}, "reserves 0: write gpus: 2"),
        ({"gpus": 1, "engine": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}, "write gpus: 4"),
        ({"gpus": 1, "engine": {"tensor_parallel_size": "all"}}, "numbers of GPUs, 1 or more"),
    ],
)
def test_an_engine_with_other_gpus_than_its_actors_is_refused(actors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(actors=actors)
