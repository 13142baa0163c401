"""Custom Ray resources, by which a job says on which nodes its roles may run."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.jobs.needs import (
    GIB,
    RAY_BYTES,
    STORE_BYTES,
    Needs,
    check_cluster,
    needs_at_once,
    needs_of,
    resources_of,
)
from services.stack.ray import can_grow, memory_obstacle
from services.supervisor.claims import Claims, largest, sized
from volley.errors import JobError
from volley.job import JOB, RLJob
from volley.state import Desired, Observed, RunRecord


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


def test_reserved_resources_are_summed_by_name() -> None:
    placed = job(
        actors={"count": 3, "resources": {"volley_actor": 1, "fast_disk": 0.5}},
        reward_workers={"count": 4, "resources": {"volley_reward": 0.25}},
        learner={"ranks": 2, "resources_per_rank": {"volley_learner": 1, "fast_disk": 1}},
    )
    assert needs_of(placed).custom == {"volley_actor": 3, "fast_disk": 3.5, "volley_reward": 1, "volley_learner": 2}
    assert needs_of(job()).custom == {}


def test_what_a_run_claims_follows_its_desired_state_and_its_own_scaling() -> None:
    scaled = job(actors={"count": 2, "max_count": 6, "gpus": 0.5}, reward_workers={"count": 2, "cpus": 0.25})
    assert resources_of(scaled) == {"CPU": 3.5, "GPU": 1.0}
    nothing, desired = Desired(), Desired(actors=4, reward_workers=4)
    assert resources_of(sized(scaled, nothing, Observed())) == {"CPU": 3.5, "GPU": 1.0}
    assert resources_of(sized(scaled, nothing, Observed(actors=3, actors_wanted=5)))["GPU"] == 2.5
    assert resources_of(sized(scaled, nothing, Observed(actors=1)))["GPU"] == 1.0, "a part of it has not started yet"
    assert resources_of(sized(scaled, desired, Observed(actors_wanted=5))) == {"CPU": 6.0, "GPU": 2.0}
    assert resources_of(largest(scaled, nothing)) == {"CPU": 7.5, "GPU": 3.0}
    assert resources_of(largest(scaled, desired)) == {"CPU": 6.0, "GPU": 2.0}, "it no longer scales itself"


def test_a_job_of_another_release_claims_nothing_until_its_driver_rejects_it() -> None:
    record = RunRecord(id="r", name="r", kind="rl", job={"kind": "new"}, created=1.0, folder="/nowhere")
    assert Claims().of(record, Desired(), Observed()) == ({}, {})


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"GPU": 1}, "GPU is not a custom resource"),
        ({"volley_actor": 0}, "greater than 0"),
        ({"": 1}, "at least 1 character"),
    ],
)
def test_resources_that_ray_would_reject_are_rejected_in_the_job(resources: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(actors={"resources": resources})


@pytest.mark.parametrize(
    ("types", "grows"),
    [
        (set(), False),
        ({"node_" + "0f" * 28, "9e" * 28}, False),  # Ray's names for nodes without a cluster manager
        ({"headgroup"}, True),
        ({"ray.head.default", "node_" + "0f" * 28}, True),
    ],
)
def test_only_a_cluster_with_named_node_types_can_grow(types: set[str], grows: bool) -> None:
    assert can_grow(types) is grows


def test_all_gpus_of_an_engine_are_reserved_together() -> None:
    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    placed = job(actors={"count": 3, "cpus": 1, "gpus": 4, "engine": engine})
    assert [dict(each) for each in needs_of(placed).processes if "GPU" in each] == [{"CPU": 1, "GPU": 4}] * 3


@pytest.mark.parametrize(
    ("actors", "message"),
    [
        ({"engine": {"tensor_parallel_size": 2}}, "reserves 0: write gpus: 2"),
        ({"gpus": 1, "engine": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}, "write gpus: 4"),
        ({"gpus": 2}, "write gpus: 1, or engine: {tensor_parallel_size: 2}"),
        ({"gpus": 1.5}, "write gpus: 1, or engine: {tensor_parallel_size: 2}"),
        ({"gpus": 1, "engine": {"tensor_parallel_size": "all"}}, "must be integers of at least 1"),
    ],
)
def test_an_engine_whose_gpus_differ_from_its_actors_is_rejected(actors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(actors=actors)


@pytest.mark.parametrize(
    ("memory", "largest", "nodes", "message"),
    [
        (9, 1, [4, 4], r"needs about 9.0 GiB of memory and the cluster's 2 nodes have 8.0 GiB: lower actors.count"),
        (9, 1, [8], "the cluster's node has 8.0 GiB"),
        (
            7,
            5,
            [4, 4],
            r"one process of the run needs about 5.0 GiB .* the largest node has 4.0 GiB: .* raise learner.ranks",
        ),
    ],
)
def test_a_run_that_never_fits_into_the_clusters_memory_is_rejected(
    memory: int, largest: int, nodes: list[int], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        check_cluster(memory * GIB, largest * GIB, [node * GIB for node in nodes])


def test_a_run_that_may_fit_is_accepted() -> None:
    check_cluster(8 * GIB, 4 * GIB, [4 * GIB, 4 * GIB])
    check_cluster(99 * GIB, 99 * GIB, [])  # nothing is known


def test_the_largest_process_is_an_actor_or_a_rank() -> None:
    cached = job(actors={"count": 3, "kv_cache_gb": 7}, learner={"ranks": 2})
    more = job(actors={"count": 3, "kv_cache_gb": 9}, learner={"ranks": 2})
    assert needs_of(more).largest_bytes - needs_of(cached).largest_bytes == 2 * GIB
    assert needs_of(more).memory_bytes - needs_of(cached).memory_bytes == 6 * GIB
    on_gpus = job(actors={"gpus": 1, "kv_cache_gb": 9})
    assert needs_of(on_gpus).largest_bytes < needs_of(more).largest_bytes, "the cache is in the GPU's memory"


def test_two_versions_of_the_weights_fit_into_the_object_store_unspilled(tmp_path: Path) -> None:
    """Ray spills what makes the store fuller than 80%."""
    weights = 4 * 1_000_000_000
    header = json.dumps({"w": {"dtype": "F32", "shape": [1_000_000_000], "data_offsets": [0, weights]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    needs = needs_of(job(model={"path": str(tmp_path)}))
    assert 0.8 * needs.object_store_bytes >= 2 * weights + STORE_BYTES
    adapters = needs_of(job(model={"path": str(tmp_path), "lora": {"rank": 8}}))
    assert adapters.object_store_bytes < weights


def test_a_run_waits_for_memory_only_while_other_runs_use_it() -> None:
    needs = Needs(cpus=2, gpus=0, memory_bytes=6 * GIB + RAY_BYTES, object_store_bytes=0)
    total = {"CPU": 8.0, "memory": 9.0}
    told = memory_obstacle(needs, 4 * GIB, total, {"CPU": 5.0})
    assert told == "waits for memory: the run needs about 6.0 GiB and 4.0 GiB are free while other runs use this host"
    assert not memory_obstacle(needs, 6 * GIB, total, {"CPU": 5.0})
    assert not memory_obstacle(needs, 4 * GIB, total, {"CPU": 6.0}), "only its own reservation is held"
    assert memory_obstacle(needs, 4 * GIB, {**total, "GPU": 1.0}, {"CPU": 6.0}), "another one holds the GPU"


def test_runs_at_once_need_what_the_largest_of_them_do() -> None:
    small, large, wide = (
        needs_of(job(actors={"count": count, "kv_cache_gb": cache, "resources": {"fast_disk": 1}}))
        for count, cache in ((1, 1), (1, 9), (4, 1))
    )
    one = needs_at_once([small, large, wide], 1)
    assert (one.cpus, one.custom) == (wide.cpus, {"fast_disk": 4})
    assert one.memory_bytes == max(small.memory_bytes, large.memory_bytes, wide.memory_bytes)
    two = needs_at_once([small, large, wide], 2)
    assert (two.cpus, two.custom) == (wide.cpus + small.cpus, {"fast_disk": 5})
    assert two.memory_bytes == large.memory_bytes + wide.memory_bytes - RAY_BYTES
    assert two.object_store_bytes == 2 * small.object_store_bytes
    assert needs_at_once([small], 5) == needs_at_once([small], 1)
