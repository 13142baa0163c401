"""The service as users see it: ``volley up``, a job through the API, everything killed once, ``volley down``."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from tests.integration.jobs import PROMPTS, unhurried_job, write_inputs
from tests.integration.processes import descendants, wait_until_gone
from tests.integration.webhooks import KEY, Receiver, receiving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS = 100
SERVER = "volley::prefork"  # the process that the others are forked from
VOLLEY = str(Path(sys.executable).parent / "volley")


class Service:
    """A stack in its own folder, used through the command line, and by REST where a state is polled."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.environment = {**os.environ, "VOLLEY_HOME": str(self.home), "XDG_CONFIG_HOME": str(folder)}
        for name in ("VOLLEY_SERVER", "VOLLEY_TOKEN", "RAY_ADDRESS"):
            self.environment.pop(name, None)
        self.environment |= {"PYTHONPATH": str(Path.cwd()), "VOLLEY_WEBHOOK_KEY": KEY}
        self.seen: set[int] = set()

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command; returns its output. Fails unless it exits with ``code``."""
        done = subprocess.run(
            [VOLLEY, *arguments], env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [VOLLEY, *arguments], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def up(self, cpus: int = 8) -> None:
        told = self.json(
            *("up", "--port", "0", "--object-store-mb", "400", "--cpus", str(cpus)),
            *("--import-from", str(Path.cwd()), "--allow-code", "tests", "--webhook-host", "127.0.0.1"),
        )
        assert told["started"]
        self.keeper, self.server = int(told["keeper"]), str(told["server"])

    def look(self) -> None:
        """Record the stack's current processes."""
        self.seen |= descendants(self.keeper) | {self.keeper}

    def observed(self, run: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.server}/v1/runs/{run}", timeout=60) as answer:
            view = json.load(answer)
        return {**view["observed"], "state": view["state"]}

    def wait(self, run: str, until: Callable[[dict[str, Any]], bool], seconds: float = 240) -> dict[str, Any]:
        """Wait until ``until`` is true of the observed state; returns that state."""
        deadline = time.monotonic() + seconds
        while not until(observed := self.observed(run)):
            assert observed["state"] != "failed", observed
            assert time.monotonic() < deadline, observed
            time.sleep(0.2)
        self.look()
        self.seen |= {worker["pid"] for worker in observed["workers"]}  # those that are forked have another parent
        return observed

    def child(self, word: str) -> int:
        """The keeper's only child whose command line contains ``word``."""
        self.look()
        found = [pid for pid in descendants(self.keeper) if word in command(pid)]
        assert len(found) == 1, [command(pid) for pid in found]
        return found[0]


def parent_name(pid: int) -> str:
    return psutil.Process(psutil.Process(pid).ppid()).name()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    service.up()
    try:
        yield service
    finally:
        service.run("down")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def job(tmp_path: Path, receiver: Receiver) -> Path:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    (inputs / "heldout.jsonl").write_text('{"prompt": "1 2="}\n{"prompt": "3 4="}\n')
    evaluation = {"data": {"path": str(inputs / "heldout.jsonl")}, "sampling": {"n": 8, "max_tokens": 8}, "ks": [1, 8]}
    tree = unhurried_job(inputs, steps=STEPS, checkpoint={"every": 10}, evaluation=evaluation)
    rule = {"kind": "above", "metric": "reward_mean", "limit": -1, "window": 1}
    tree["notify"] = [{"url": receiver.url(), "secret_env": "VOLLEY_WEBHOOK_KEY", "states": ["done"], "rules": [rule]}]
    file = inputs / "job.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_a_run_survives_its_driver_the_api_and_redis_and_is_exact(
    service: Service, job: Path, receiver: Receiver, tmp_path: Path
) -> None:
    run = service.json("submit", str(job), "--key", "once")["id"]
    assert service.json("submit", str(job), "--key", "once")["id"] == run
    follower = service.start("show", run, "--follow", "--json")
    service.wait(run, lambda now: now["step"] >= 12)
    service.run("pause", run)  # or a fast machine would do all steps before an engine has started
    service.run("scale", run, "--actors", "2")
    before = service.wait(run, lambda now: now["actors"] == 2)
    service.run("resume", run)
    forked = {each["role"] for each in before["workers"] if parent_name(each["pid"]) == SERVER}
    assert forked == {"actor", "learner_rank"}, "they start without importing everything again"

    os.kill(int(before["driver"].rpartition(":")[2]), signal.SIGKILL)
    after = service.wait(run, lambda now: now["life"] == 2 and now["state"] == "running")
    assert after["driver"] != before["driver"]
    kept = service.wait(run, lambda now: now["actors"] == 2)  # the desired state is kept
    assert kept["state"] == "running"

    os.kill(service.child("services.api.serve"), signal.SIGKILL)
    os.kill(service.child("redis-server"), signal.SIGKILL)
    eventually(lambda: service.run("ls"))
    service.wait(run, lambda now: now["state"] == "done")

    out, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0, out
    told = [json.loads(line) for line in out.splitlines()]
    assert {"observed", "metrics", "events"} <= {event["event"] for event in told}
    assert told[-1] == {"event": "ended", "state": "done"}
    assert [row["step"] for event in told if event["event"] == "metrics" for row in event["rows"]][-1] == STEPS - 1
    check_exact(Path(service.json("show", run)["folder"]), service.json("show", run))
    check_export(service, run, tmp_path)
    assert "Traceback" not in service.run("logs", run, "driver")
    eventually(lambda: check_told(receiver, run))
    assert service.run("pause", run, code=4) == ""
    service.run("rm", run, "--yes")
    service.run("show", run, code=3)


def test_down_leaves_no_process_and_up_resumes_the_run(service: Service, job: Path) -> None:
    service.look()
    assert "127.0.0.1" in listened_on(service.seen)
    assert listened_on(service.seen) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    run = service.json("submit", str(job))["id"]
    service.wait(run, lambda now: now["step"] >= 20)
    folder = Path(service.json("show", run)["folder"])
    assert not service.json("up")["started"]
    service.run("down")
    wait_until_gone(service.seen, 30)
    assert "no service is up" in service.run("down")
    done = len(rows(folder / "metrics.jsonl"))

    service.up()
    service.wait(run, lambda now: now["life"] == 2 and now["state"] == "running")
    (resumed,) = [row["step"] for row in rows(folder / "events.jsonl") if row["kind"] == "resumed"]
    assert resumed == done, "no step is repeated"
    service.run("stop", run)
    stopped = service.wait(run, lambda now: now["state"] == "stopped")["step"]
    assert (Path(service.json("show", run)["folder"]) / "checkpoints" / f"step-{stopped}").is_dir()
    service.run("down")
    wait_until_gone(service.seen, 30)


def eventually(act: Callable[[], object], seconds: float = 60) -> None:
    """Retry the call until it does not fail."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            act()
        except AssertionError:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        else:
            return


def listened_on(pids: set[int]) -> set[str]:
    """Addresses at which any of the processes listens."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # some of Ray's helpers have ended by now
            held = psutil.Process(pid).net_connections("tcp")
            found |= {each.laddr.ip for each in held if each.status == psutil.CONN_LISTEN}
    return found


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_exact(folder: Path, view: dict[str, Any], steps: int = STEPS) -> None:
    """Assert that every step was done once and every group has one end, in the folder and in Redis."""
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(steps))
    ledger = rows(folder / "ledger.jsonl")
    assert max(Counter(row["group"] for row in ledger).values()) == 1
    trained = [row for row in ledger if row["end"] == "trained"]
    dropped = [row for row in ledger if row["end"] != "trained"]
    counts = view["ledger"]
    assert (counts["trained"], counts["dropped"], counts["in_flight"]) == (len(trained), len(dropped), 0)
    assert counts["admitted"] == len(ledger)
    assert len(trained) == steps * PROMPTS


def check_told(receiver: Receiver, run: str) -> None:
    """Assert that the webhook got each notice, however often the processes that send them were killed."""
    notices = {headers["webhook-id"]: body for headers, body in receiver.got}
    assert sorted(body["type"] for body in notices.values()) == ["rule.above", "run.done"]
    assert {body["data"]["run"]["id"] for body in notices.values()} == {run}


def check_export(service: Service, run: str, tmp_path: Path) -> None:
    """Assert that the export of the last checkpoint equals the model that the learner exported."""
    folder = Path(service.json("show", run)["folder"])
    told = service.json("export", run, "--out", str(tmp_path / "exported"))
    assert told["checkpoint"] == STEPS
    ours, learners = (load_file(where / "model.safetensors") for where in (tmp_path / "exported", folder / "model"))
    assert ours.keys() == learners.keys()
    assert all(ours[name].equal(learners[name]) for name in ours)
    assert (tmp_path / "exported" / "tokenizer.json").exists()
    written = [tmp_path / "exported", folder / "model", *(folder / "checkpoints").iterdir()]
    modes = {file.stat().st_mode & 0o777 for each in written for file in each.glob("*.safetensors")}
    assert modes == {(folder / "metrics.jsonl").stat().st_mode & 0o777}  # the same mode as every other file
    service.run("export", run, "--out", str(tmp_path / "exported"), code=1)
