"""A cluster simulated on one machine: each role has its own node, and each of these nodes is lost."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.stack.launcher.raylet import forking_workers
from tests.integration.conftest import started_cluster, without_token
from tests.integration.jobs import unhurried_job, write_inputs
from tests.integration.test_faults import Running

pytestmark = pytest.mark.integration

ROLES = {"Actor": "volley_actor", "RewardWorker": "volley_reward", "Rank": "volley_learner"}


class Nodes:
    """A Ray cluster of several raylets: a head that can run no role, and nodes that are named after roles."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.address = str(cluster.address)
        self.nodes = {resource: self.add(resource) for resource in ROLES.values()}

    def add(self, resource: str) -> Any:
        """Add a node for the role that requires ``resource``."""
        with forking_workers():
            return self.cluster.add_node(num_cpus=2, resources={resource: 2}, object_store_memory=128 << 20)

    def replace(self, resource: str) -> None:
        """Add a new node for a role, then lose the one its processes run on, as when a machine fails."""
        lost, self.nodes[resource] = self.nodes[resource], self.add(resource)
        self.cluster.remove_node(lost, allow_graceful=False)

    def places(self) -> dict[str, set[str]]:
        """By role class, the nodes on which its live processes run."""
        from ray._private.state import actors

        found: dict[str, set[str]] = {role: set() for role in ROLES}
        for actor in actors().values():
            if actor["State"] == "ALIVE" and actor["ActorClassName"] in found:
                found[actor["ActorClassName"]].add(actor["Address"]["NodeID"])
        return found

    def expected(self) -> dict[str, set[str]]:
        return {role: {self.nodes[resource].node_id} for role, resource in ROLES.items()}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    import ray

    with started_cluster(num_cpus=0, object_store_memory=256 << 20) as cluster, without_token():
        nodes = Nodes(cluster)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        yield nodes
        ray.shutdown()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job whose roles each require the resource that only their own nodes offer."""
    folder = tmp_path_factory.mktemp("cluster")
    write_inputs(folder)
    placed = unhurried_job(
        folder,
        steps=4000,
        actors={"max_num_seqs": 64, "resources": {"volley_actor": 1}},
        reward_workers={"count": 1, "cpus": 0.5, "resources": {"volley_reward": 1}},
        learner={"ranks": 1, "resources_per_rank": {"volley_learner": 1}},
        checkpoint={"every": 10},
    )
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(placed))
    return file


def events(out: Path) -> list[str]:
    (file,) = out.glob("*/events.jsonl")
    return [json.loads(line)["kind"] for line in file.read_text().splitlines()]


def wait_for_event(run: Running, kind: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while kind not in events(run.out):
        assert run.process.poll() is None, run.errors.read_text()
        assert time.monotonic() < deadline, events(run.out)
        time.sleep(0.5)


def test_roles_run_on_their_own_nodes_and_survive_losing_them(nodes: Nodes, job: Path, tmp_path: Path) -> None:
    run = Running(job, tmp_path, "--ray", nodes.address, own_server=False)
    run.wait_for_steps(more=15)
    assert nodes.places() == nodes.expected()

    nodes.replace("volley_actor")
    wait_for_event(run, "actor_died")
    run.wait_for_steps(more=5)
    assert nodes.places() == nodes.expected()

    nodes.replace("volley_reward")
    wait_for_event(run, "reward_worker_died")
    run.wait_for_steps(more=5)
    assert nodes.places() == nodes.expected()

    nodes.replace("volley_learner")
    wait_for_event(run, "learner_restarted")
    run.wait_for_steps(more=5)
    assert nodes.places() == nodes.expected()

    os.killpg(run.process.pid, signal.SIGINT)
    code, errors = run.end()
    assert (code, errors.splitlines()[-1].split(",")[0]) == (130, "volley: stopping at a checkpoint")
    assert sum(map(len, nodes.places().values())) == 0  # no process of a role is left on the cluster


def test_a_resource_that_no_node_has_is_a_clear_error(nodes: Nodes, job: Path, tmp_path: Path) -> None:
    run = Running(job, tmp_path, "--ray", nodes.address, "--set", "actors.resources.volley_actor=99", own_server=False)
    code, errors = run.end(120)
    assert code == 1
    assert "the job reserves 99 volley_actors, it has" in errors.strip().splitlines()[-1]
