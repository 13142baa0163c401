"""A Ray cluster with one node per role, and the service on it, which is used only through its REST API."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.rehearsal.places import Places
from volley.ports import free_port

RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
VOLLEY = str(Path(sys.executable).with_name("volley"))
RESOURCES = {"actor": "volley_actor", "reward": "volley_reward", "learner": "volley_learner"}
CLASSES = {"Actor": "actor", "RewardWorker": "reward", "Rank": "learner"}
START_SECONDS = 180.0
# With these a lost node is noticed within seconds instead of a minute.
QUICK = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


def until(what: str, holds: Callable[[], bool], seconds: float) -> float:
    """Wait until ``holds()`` is true; returns the seconds it took. Raises TimeoutError, naming ``what``."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"timed out after {seconds:g} s waiting until {what}")
        time.sleep(0.25)
    return time.monotonic() - begun


class Cluster:
    """A head that can run no role, and nodes that each offer one role's resource.

    Attributes:
        environment: environment variables with which a process can reach the cluster.
        nodes: addresses of the nodes by name.
    """

    def __init__(self, folder: Path, places: Places) -> None:
        self.folder, self.places = folder, places
        self.address = f"{places.head}:{free_port()}"
        self.jobs = f"http://127.0.0.1:{free_port()}"
        self.nodes: dict[str, str] = {}
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
            **QUICK,
            "PYTHONPATH": str(Path.cwd()),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_raylet_start_wait_time_s": "120",  # for busy machines
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_head(self) -> None:
        """Start the head; returns when its job server answers and its node has joined, which others look for."""
        head, port = self.address.rsplit(":", 1)
        options = [f"--node-ip-address={head}", f"--port={port}", "--num-cpus=0", "--object-store-memory=268435456"]
        options += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.jobs.rpartition(':')[2]}"]
        self._start("head", [*RAY, "start", "--head", "--block", *self._common("head"), *options])
        until("Ray's head answers", self._answers, START_SECONDS)
        self.wait_for_nodes(1)

    def add(self, name: str, role: str) -> None:
        """Start a node for ``role``, without waiting until it has joined."""
        self.nodes[name] = self.places.add(name)
        options = [f"--address={self.address}", f"--node-ip-address={self.nodes[name]}", "--num-cpus=2"]
        options += [f"--resources={json.dumps({RESOURCES[role]: 4})}", "--object-store-memory=134217728"]
        command = [*RAY, "start", "--block", *self._common(name), *options]
        self._start(name, self.places.command(name, command))

    def lose(self, name: str) -> str:
        """Lose a node without notice, by cutting its cable or by SIGKILL; returns how."""
        if self.places.cut(name):
            return "its cable is pulled"
        _kill(self._processes.pop(name))
        return "every process of it is killed"

    def ask(self, path: str) -> Any:
        """The answer of Ray's own API."""
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        answer = httpx.get(f"{self.jobs}{path}", headers=headers, timeout=20, trust_env=False)
        return answer.raise_for_status().json()

    def alive(self) -> int:
        """Number of nodes alive according to Ray, including the head. Raises RuntimeError if one has exited."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name}: {(self.folder / f'{name}.log').read_text()[-1000:]}")
        rows = self.ask("/api/v0/nodes?detail=true")["data"]["result"]["result"]
        return sum(row["state"] == "ALIVE" for row in rows)

    def wait_for_nodes(self, count: int) -> None:
        """Wait until ``count`` nodes have joined; raises RuntimeError with the end of each node's log."""
        try:
            until(f"{count} nodes have joined", lambda: self.alive() == count, START_SECONDS)
        except TimeoutError as error:
            logs = sorted(self.folder.glob("*.log"))
            raise RuntimeError("\n".join(f"{log.name}: {log.read_text()[-600:]}" for log in logs)) from error

    def processes(self) -> dict[str, dict[int, str]]:
        """By role: the ids of its live processes, each with the role of the node it runs on."""
        nodes = self.ask("/api/v0/nodes?detail=true")["data"]["result"]["result"]
        names = {resource: role for role, resource in RESOURCES.items()}
        roles = {
            node["node_id"]: names[resource] for node in nodes for resource in node["resources_total"].keys() & names
        }
        found: dict[str, dict[int, str]] = {role: {} for role in RESOURCES}
        for row in self.ask("/api/v0/actors?detail=true")["data"]["result"]["result"]:
            if row["state"] == "ALIVE" and row["class_name"] in CLASSES:
                found[CLASSES[row["class_name"]]][row["pid"]] = roles.get(row["node_id"], "head")
        return found

    def close(self) -> None:
        """Kill every node, the head last."""
        for process in reversed(self._processes.values()):
            _kill(process)

    def _common(self, name: str) -> list[str]:
        # Nodes that share a folder would use each other's sockets.
        folder = f"--temp-dir={self.folder / name}"
        return [folder, "--include-log-monitor=false", f"--dashboard-agent-listen-port={free_port()}"]

    def _answers(self) -> bool:
        if self._processes["head"].poll() is not None:
            raise RuntimeError((self.folder / "head.log").read_text()[-2000:])
        with suppress(httpx.HTTPError):
            return bool(self.ask("/api/version"))
        return False

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for each in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait(20)


class Service:
    """`volley up` on an existing cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._environment = {**cluster.environment, "VOLLEY_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        state = self._volley(
            *("up", "--port", "0", "--ray", cluster.jobs, "--import-from", str(Path.cwd()), "--allow-code", "tests")
        )
        self._http = httpx.Client(base_url=state["server"], timeout=90, trust_env=False)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one request; returns the answer. Raises RuntimeError if it is rejected."""
        answer = self._http.request(method, path, json=body)
        if answer.is_error:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer.json()

    def observed(self, run: str) -> dict[str, Any]:
        """The run's observed state; raises RuntimeError if the run has failed."""
        view = self.call("GET", f"/v1/runs/{run}")
        if view["state"] == "failed":
            raise RuntimeError(view["observed"]["problem"])
        return {**view["observed"], "state": view["state"]}

    def down(self) -> None:
        self._http.close()
        self._volley("down")

    def _volley(self, *arguments: str) -> Any:
        done = subprocess.run(
            [VOLLEY, *arguments, "--json"],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"volley {arguments[0]}: {done.stderr}")
        return json.loads(done.stdout)


@contextmanager
def service_on_nodes(folder: Path, places: Places) -> Iterator[tuple[Cluster, Service]]:
    """A head, one node per role, and the service on them; everything is stopped after the block."""
    cluster = Cluster(folder, places)
    try:
        cluster.start_head()
        for role in RESOURCES:
            cluster.add(role, role)
        service = Service(cluster, folder / "home")
        try:
            cluster.wait_for_nodes(1 + len(RESOURCES))
            yield cluster, service
        finally:
            service.down()
    finally:
        cluster.close()
