"""Six runs on a cluster for two: they start in order, one is preempted, and drivers, API and Redis are killed.

Then a sweep on it, whose command is interrupted.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.integration.jobs import write_inputs
from tests.integration.test_service import Service, rows
from volley.client import Client, Run
from volley.errors import ServerAway, ServerBusy
from volley.state import Observed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

# Steps. The first run must outlast the decision to preempt; the second is halted early, and compared with the third.
LONG, MIDDLE, SHORT = 800, 200, 10
SECONDS = 240.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("cluster"))
    service.up(cpus=2)
    try:
        yield service
    finally:
        service.run("down")


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with Client(service.server) as client:
        yield client


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{i} 7=", "answer": "7"}}\n' for i in range(8)))
    return folder


def job(folder: Path, name: str, steps: int, cpus: int = 1) -> dict[str, Any]:
    """A job that reserves this many CPUs."""
    return {
        "kind": "sft",
        "name": name,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl")},
        "steps": steps,
        "rows_per_step": 4,
        "learner": {"cpus_per_rank": cpus},
    }


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds; meanwhile the server may be away."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except (ServerAway, ServerBusy):
            pass
        time.sleep(0.2)
    pytest.fail(f"not true within {SECONDS:g} s")


def waiting(client: Client) -> list[str]:
    """The runs that wait, in their order."""
    return [place.run for place in client.queue().items if place.state == "waiting"]


def admitted(client: Client, runs: Sequence[Run]) -> list[str]:
    """Wait until all of the runs have been admitted; returns them in that order."""
    since: dict[str, float] = {}

    def all_seen() -> bool:
        since.update({place.run: place.since for place in client.queue().items if place.state == "admitted"})
        return all(run.id in since for run in runs)

    until(all_seen)
    return sorted((run.id for run in runs), key=lambda run: since[run])


def observed(run: Run) -> Observed:
    seen = run.view().observed
    assert seen.state != "failed", seen
    return seen


def driver(run: Run) -> int:
    """The process id of the run's driver."""
    return int(observed(run).driver.rpartition(":")[2])


def halt_under_way(runs: list[Run]) -> None:
    """Stop each run's driver once it has done five steps."""

    def all_halted() -> bool:
        for run in [run for run in runs if observed(run).step >= 5]:
            os.kill(driver(run), signal.SIGSTOP)
            runs.remove(run)
        return not runs

    until(all_halted)


def told_to_end(pid: int) -> bool:
    """Whether SIGTERM waits for a stopped process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(status[each], 16) >> (signal.SIGTERM - 1) & 1 for each in ("SigPnd", "ShdPnd"))


def test_six_runs_share_a_cluster_in_order_and_nothing_is_lost(service: Service, client: Client, inputs: Path) -> None:
    gate = client.submit(job(inputs, "gate", 1_000_000, cpus=2))  # the others wait behind it until all are there
    steps = {"first": LONG, "second": MIDDLE, "third": MIDDLE, "fourth": SHORT}
    queued = [client.submit(job(inputs, name, count)) for name, count in steps.items()]
    urgent = client.submit(job(inputs, "urgent", SHORT), priority=-5)
    until(lambda: waiting(client) == [run.id for run in (*queued, urgent)])
    assert urgent.view().observed.problem == f"place 5 in the queue: waits for 1 CPU: {gate.id} holds 2"

    gate.stop()
    first, second, *others = queued
    halt_under_way([first, second])  # so that neither ends before the test is done with it
    os.kill(driver(first), signal.SIGKILL)
    urgent.set(priority=5)
    until(lambda: any(place.preempted_by == urgent.id for place in client.queue().items))
    for server in ("services.api.serve", "redis-server"):
        os.kill(service.child(server), signal.SIGKILL)
    until(lambda: waiting(client)[-2:] == [run.id for run in others])
    until(lambda: told_to_end(driver(second)))
    os.kill(driver(second), signal.SIGCONT)
    assert admitted(client, (urgent, *others)) == [run.id for run in (urgent, *others)]

    runs = (first, second, urgent, *others)
    for run in runs:
        assert run.wait(SECONDS).state == "done"
    assert gate.view().state == "stopped"
    check_exact(runs, second, others[0])
    audit = [(each.who, each.action, each.run) for each in reversed(client.audit())]
    submitted = [("anybody", "submit", run.id) for run in (gate, *queued, urgent)]
    changed = [("anybody", "stop", gate.id), ("anybody", "set", urgent.id), ("supervisor", "preempt", second.id)]
    assert audit == [*submitted, *changed]


def check_exact(runs: Sequence[Run], preempted: Run, other: Run) -> None:
    """Assert that the runs did each step once, and that preemption changed no weight."""
    views = {run.id: run.view() for run in runs}
    for view in views.values():
        done = [row["step"] for row in rows(Path(view.record.folder) / "metrics.jsonl")]
        assert done == list(range(view.record.job["steps"])), view.record.name
    assert [view.observed.life for view in views.values()] == [2, 2, 1, 1, 1]
    assert [event.kind for event in preempted.events(kind="preempted")] == ["preempted"]
    models = [
        load_file(Path(views[run.id].record.folder) / "model" / "model.safetensors") for run in (preempted, other)
    ]
    assert models[0].keys() == models[1].keys()
    assert all(models[0][name].equal(models[1][name]) for name in models[0]), "it went on exactly"


def test_a_sweep_goes_on_in_the_service_when_its_command_ends(
    service: Service, client: Client, inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(inputs, "sums", SHORT)))
    settings = [{"name": f"lr {lr}", "set": {"optimizer.lr": lr}} for lr in (1e-4, 1e-3)]
    tree = {"base": "job.yaml", "list": settings, "seeds": [0, 1], "at_once": 2, "report": {"metrics": ["loss"]}}
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump(tree))
    command = ("sweep", str(tmp_path / "rates.yaml"), "--submit", "--server", service.server, "--out", str(tmp_path))

    interrupted = service.start(*command)
    until(lambda: len(client.runs(tags={"sweep": "rates"})) == 2)
    interrupted.send_signal(signal.SIGINT)
    out, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130, out
    assert "the runs that it submitted go on in the service" in out

    told = service.json(*command)
    runs = client.runs(tags={"sweep": "rates"})
    assert sorted((run.tags["group"], run.tags["seed"], run.state) for run in runs) == [
        (group, seed, "done") for group in ("lr 0.0001", "lr 0.001") for seed in ("0", "1")
    ]
    assert {run["run"] for run in told["runs"]} == {run.id for run in runs}
    slow, fast = (group["results"]["loss"] for group in told["groups"])
    assert slow["low"] <= slow["mean"] <= slow["high"]
    assert fast["mean"] < slow["mean"]
