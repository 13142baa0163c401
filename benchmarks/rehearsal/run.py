"""Rehearse a multi-node cluster on one machine: submit a run, scale its roles, lose a node, and check the result.

    python -m benchmarks.rehearsal.run [--namespaces] [--steps 400]

Actors, learner and reward workers each have their own Ray node; the service runs beside the head and is used only
through its REST API. Each role is scaled separately while the other roles' processes must stay; then the actors' node
is lost and a new one joins. The run must end with every step trained once and every group at exactly one end. With
``--namespaces`` (needs root) each node has its own address, and the node is lost by pulling its cable. It prints what
happens when, and fails with an exception if something does not happen as expected.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.cluster import RESOURCES, Cluster, Service, service_on_nodes, until
from benchmarks.rehearsal.places import OneAddress, Places, namespaces
from tests.integration.jobs import unhurried_job, write_inputs

SECONDS = 240.0  # time limit for each event; engines start in 15 to 25 s on an idle machine
Say = Callable[[str], None]


def job_of(folder: Path, steps: int) -> dict[str, Any]:
    """A job whose roles each require the resource that only their own node offers."""
    write_inputs(folder)
    return unhurried_job(
        folder,
        steps=steps,
        actors={"max_num_seqs": 64, "cpus": 0.5, "kv_cache_gb": 0.2, "resources": {RESOURCES["actor"]: 1}},
        reward_workers={"count": 1, "cpus": 0.2, "resources": {RESOURCES["reward"]: 1}},
        learner={"ranks": 1, "cpus_per_rank": 0.5, "resources_per_rank": {RESOURCES["learner"]: 1}},
        checkpoint={"every": 50},
    )


def rehearse(places: Places, steps: int, say: Say) -> None:
    """Run the whole rehearsal in a temporary folder.

    Raises:
        TimeoutError: an expected event did not happen in time.
        RuntimeError: a node or the run failed, or a request was rejected.
        AssertionError: processes or the ledger are not as they should be.
    """
    with tempfile.TemporaryDirectory(prefix="vly-") as name, service_on_nodes(Path(name), places) as (cluster, service):
        say(f"the service is up on {cluster.alive()} nodes: " + ", ".join(f"{k} {v}" for k, v in cluster.nodes.items()))
        inputs = cluster.folder / "inputs"
        inputs.mkdir()
        run = service.call("POST", "/v1/runs", {"job": job_of(inputs, steps)})["record"]["id"]
        _wait_for_steps(service, run, 10)
        say(f"trained 10 steps; {_check_placement(cluster, actor=1, reward=1, learner=1)}")
        _scale(cluster, service, run, say, actors=2)
        _scale(cluster, service, run, say, reward_workers=3)
        _scale(cluster, service, run, say, actors=1)
        _scale(cluster, service, run, say, reward_workers=1)
        _lose_actor_node(cluster, service, run, say)
        for node in cluster.nodes:
            if (received := places.received(node)) is not None:
                say(f"{node} received {received / 2**20:.0f} MiB through its cable")
        view = _wait_until_done(service, run)
        say(f"done: {_check_exact(Path(view['record']['folder']), view['ledger'], steps)}")
    say("everything has ended")


def _wait_for_steps(service: Service, run: str, more: int) -> None:
    target = service.observed(run)["step"] + more
    until(f"{more} more steps are trained", lambda: bool(service.observed(run)["step"] >= target), SECONDS)


def _check_placement(cluster: Cluster, **expected: int) -> str:
    """Assert that each role has this many processes, all on its own node; returns a description."""
    seen = cluster.processes()
    assert {role: len(pids) for role, pids in seen.items()} == expected, seen
    assert all(node == role for role, pids in seen.items() for node in pids.values()), seen
    return ", ".join(f"{count} x {role} on its own node" for role, count in expected.items())


def _scale(cluster: Cluster, service: Service, run: str, say: Say, **change: int) -> None:
    """Change one role's count, and assert that the other roles keep their processes."""
    ((name, count),) = change.items()
    role = {"actors": "actor", "reward_workers": "reward"}[name]
    before = cluster.processes()
    # Paused meanwhile: a fast machine would finish all steps before an engine has started.
    service.call("PATCH", f"/v1/runs/{run}", {**change, "paused": True})
    until(f"{name} is {count}", lambda: bool(service.observed(run)[name] == count), SECONDS)
    until(f"{role} has {count} processes", lambda: len(cluster.processes()[role]) == count, SECONDS)
    after = cluster.processes()
    others = RESOURCES.keys() - {role}
    assert {each: before[each] for each in others} == {each: after[each] for each in others}
    assert set(after[role].values()) == {role}
    assert len(before[role].keys() & after[role].keys()) == min(len(before[role]), count)
    service.call("PATCH", f"/v1/runs/{run}", {"paused": False})
    _wait_for_steps(service, run, 3)
    say(f"PATCH {json.dumps(change)}: {count} on their own node, the processes of the other roles are the same")


def _lose_actor_node(cluster: Cluster, service: Service, run: str, say: Say) -> None:
    others = {role: pids for role, pids in cluster.processes().items() if role != "actor"}
    begun = time.monotonic()
    how = cluster.lose("actor")
    until("the loss is noticed", lambda: bool(service.observed(run)["actors"] == 0), SECONDS)
    say(f"the actors' node is lost ({how}): missed after {time.monotonic() - begun:.0f} s, no actor is left")
    cluster.add("actor-again", "actor")
    until("another actor serves", lambda: bool(service.observed(run)["actors"] == 1), SECONDS)
    _wait_for_steps(service, run, 5)
    now = cluster.processes()
    assert {role: pids for role, pids in now.items() if role != "actor"} == others
    say(f"a new node joined: an actor serves and the run trains again {time.monotonic() - begun:.0f} s after the loss")


def _wait_until_done(service: Service, run: str) -> dict[str, Any]:
    until("the run is done", lambda: bool(service.observed(run)["state"] == "done"), SECONDS)
    view: dict[str, Any] = service.call("GET", f"/v1/runs/{run}")
    view["ledger"] = service.call("GET", f"/v1/runs/{run}/ledger")["counts"]
    return view


def _check_exact(folder: Path, counts: dict[str, int], steps: int) -> str:
    """Assert that in folder and Redis every step was trained once and every group has one end."""
    metrics, ledger = ([json.loads(row) for row in (folder / f).read_text().splitlines()] for f in FILES)
    assert [row["step"] for row in metrics] == list(range(steps))
    assert max(Counter(row["group"] for row in ledger).values()) == 1
    trained = sum(row["end"] == "trained" for row in ledger)
    assert counts["admitted"] == len(ledger) == counts["trained"] + counts["dropped"]
    assert (counts["trained"], counts["in_flight"]) == (trained, 0)
    return f"{steps} steps once each, {counts['admitted']} groups = {trained} trained + {counts['dropped']} dropped"


FILES = ("metrics.jsonl", "ledger.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description="Rehearse a cluster on one machine.")
    parser.add_argument(
        "--namespaces", action="store_true", help="give each node its own network namespace; needs root"
    )
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: everything started is stopped
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {line}", flush=True)

    with namespaces() if options.namespaces else nullcontext(OneAddress()) as places:
        rehearse(places, options.steps, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
