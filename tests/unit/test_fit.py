"""Which runs never fit on the nodes of a cluster, against a search that tries every node for every process."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.jobs.needs import Bundle, bundles_of, resources_of
from services.supervisor.claims import Claims
from services.supervisor.fit import misfit
from services.supervisor.queue import plan, total
from tests.integration.api.servers import a_job
from volley.job import JOB
from volley.state import Desired, Observed, Place, RunRecord

Node = dict[str, float]


def fits_slowly(processes: Sequence[Mapping[str, float]], nodes: Sequence[Node]) -> bool:
    """Try every node for the first process, and the rest likewise."""
    if not processes:
        return True
    first, *rest = processes
    for at, node in enumerate(nodes):
        left = {name: node.get(name, 0.0) - first.get(name, 0.0) for name in {*node, *first}}
        if min(left.values()) >= -1e-9 and fits_slowly(rest, [*nodes[:at], left, *nodes[at + 1 :]]):
            return True
    return False


names = ("CPU", "GPU", "fast_disk")
nodes = st.lists(st.fixed_dictionaries({}, optional={name: st.integers(0, 4).map(float) for name in names}), max_size=3)
amounts = st.dictionaries(st.sampled_from(names), st.sampled_from((0.5, 1.0, 2.0, 3.0)), min_size=1, max_size=3)
bundles = st.builds(Bundle, st.just("actor"), amounts.map(lambda each: tuple(each.items())), st.integers(1, 3))
phases = st.lists(bundles, max_size=2)


def processes_of(phase: Sequence[Bundle]) -> list[Mapping[str, float]]:
    return [dict(bundle.amounts) for bundle in phase for _ in range(bundle.count)]


@settings(max_examples=400, deadline=None)
@given(st.lists(phases, min_size=1, max_size=2), nodes)
def test_a_run_is_refused_exactly_if_no_assignment_of_its_processes_exists(
    run: list[list[Bundle]], cluster: list[Node]
) -> None:
    possible = all(fits_slowly(processes_of(phase), cluster) for phase in run)
    reason = misfit(run, cluster)
    assert (reason == "") == possible, reason
    if reason:
        assert "needs" in reason


@pytest.mark.parametrize(
    ("run", "cluster", "reason"),
    [
        (
            [Bundle("actor", (("CPU", 1.0), ("GPU", 4.0)), 1)],
            [{"CPU": 8.0, "GPU": 2.0}] * 2,
            "one actor needs 1 CPU and 4 GPUs on one node, and the largest has 2 GPUs",
        ),
        (
            [Bundle("actor", (("CPU", 8.0), ("GPU", 1.0)), 1)],
            [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 16.0}],
            "one actor needs 8 CPUs and 1 GPU on one node, and no node has all of that",
        ),
        (
            [Bundle("learner rank", (("GPU", 3.0),), 2)],
            [{"GPU": 4.0}, {"GPU": 2.0}],
            "needs 2 learner ranks with 3 GPUs each, and the nodes hold 1",
        ),
        (
            [Bundle("actor", (("GPU", 2.0),), 2), Bundle("learner rank", (("GPU", 3.0),), 1)],
            [{"GPU": 3.0}, {"GPU": 3.0}, {"GPU": 1.0}],
            "needs 2 x actor with 2 GPUs, 1 x learner rank with 3 GPUs: the nodes do not hold these processes together",
        ),
    ],
)
def test_the_reason_names_the_processes_and_what_they_lack(run: list[Bundle], cluster: list[Node], reason: str) -> None:
    assert misfit([run], cluster) == reason


def test_the_search_on_a_large_cluster_has_a_bound() -> None:
    cluster = [{"CPU": 64.0 + number % 7, "GPU": 8.0} for number in range(300)]
    run = [
        *(Bundle("actor", (("CPU", 3.0), ("GPU", 1.0)), 700), Bundle("reward worker", (("CPU", 0.1),), 900)),
        *(
            Bundle("environment worker", (("CPU", 0.7),), 900),
            Bundle("learner rank", (("CPU", 5.0), ("GPU", 4.0)), 200),
        ),
    ]
    assert misfit([run], cluster) == ""


def actors(count: int, cpus: int, gpus: int) -> dict[str, Any]:
    engine = {"tensor_parallel_size": max(1, gpus)}
    return {"count": count, "cpus": cpus, "gpus": gpus, "engine": engine}


jobs = st.fixed_dictionaries(
    {
        "actors": st.builds(actors, st.integers(1, 3), st.integers(0, 2), st.integers(0, 4)),
        "learner": st.fixed_dictionaries({"ranks": st.integers(1, 2), "gpus_per_rank": st.integers(0, 1)}),
        "reward_workers": st.fixed_dictionaries({"count": st.integers(1, 2)}),
    }
)


@given(jobs)
def test_the_bundles_of_a_job_add_up_to_what_it_reserves(changes: dict[str, Any]) -> None:
    job = JOB.validate_python(a_job("a", **changes))
    (phase,) = bundles_of(job)
    added = total(processes_of(phase))
    assert {name: pytest.approx(value) for name, value in added.items()} == resources_of(job)


@settings(max_examples=50, deadline=None)
@given(jobs, st.lists(st.fixed_dictionaries({"CPU": st.just(4.0), "GPU": st.integers(0, 4).map(float)}), max_size=2))
def test_the_queue_admits_a_run_on_an_idle_cluster_exactly_if_its_processes_fit(
    changes: dict[str, Any], cluster: list[Node]
) -> None:
    job = JOB.validate_python(a_job("a", **changes))
    record = RunRecord(id="a", name="a", kind="rl", job=job.model_dump(mode="json"), created=0.0, folder="/a")
    claims, desired, observed = Claims(), Desired(), Observed()
    resources, most = claims.of(record, desired, observed)
    place = Place(run="a", owner="", priority=0, submitted=0.0, since=0.0, resources=resources, most=most)
    misfits = {"a": claims.misfit(record, desired, observed, cluster)}
    (planned,) = plan([place], total(cluster), {}, 0.0, misfits)
    (phase,) = bundles_of(job)
    assert (planned.state == "admitted") == fits_slowly(processes_of(phase), cluster), planned.reason
    if planned.state == "waiting":
        assert planned.reason.startswith(("needs", "one"))
        behind = place.model_copy(update={"run": "b", "submitted": 1.0, "resources": {}, "most": {}})
        assert [each.run for each in plan([place, behind], total(cluster), {}, 1e6, misfits)] == ["b", "a"]
