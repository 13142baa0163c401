"""Run a job on the whole service while its processes are killed and stopped at random; no step or group may be lost.

    python -m benchmarks.chaos.run [--samples programs] [--minutes 30] [--steps N] [--seed 0] [--every 5 20]
                                   [--folder demo/chaos]

It starts its own service (`volley up`) and a second Ray node for the actors, and submits a job. Its samples are
programs, and nearly all of them attack their sandbox. With ``--samples episodes`` they are conversations; one in ten
hangs, crashes, floods, lies or never ends. Every few seconds it picks a component (sometimes two) and sends one
of its processes SIGKILL or SIGSTOP, or SIGTERM if the process handles it; a node loses all its processes at once. After
``--minutes`` it stops the run; with ``--steps`` it then waits until all steps are done. Finally it checks that every
step was trained once, that the ledger is exact, that every reward was earned and no process is left, and prints the
faults survived by kind, with the time until the run trained again.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil

from benchmarks.chaos import episodes, samples
from volley.ports import free_port

VOLLEY = str(Path(sys.executable).with_name("volley"))
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
# Component -> part of its process's command line, and the signals it gets. Ray's head is spared: without it no driver
# survives.
COMPONENTS: dict[str, tuple[str, tuple[signal.Signals, ...]]] = {
    "actor": ("ray::Actor", (KILL, STOP)),
    "engine in an actor": ("VLLM::EngineCore", (KILL, STOP)),
    "reward worker": ("ray::RewardWorker", (KILL, STOP)),
    "sandbox child": ("bwrap", (KILL, STOP)),
    "environment worker": ("ray::EnvironmentWorker", (KILL, STOP)),
    "process of programs": ("outside/child.py", (KILL, STOP)),
    "learner rank": ("ray::Rank", (KILL, STOP)),
    "driver": ("services.runs.driver", (KILL, STOP, TERM)),
    "Redis": ("redis-server", (KILL, STOP)),
    "API and supervisor": ("services.api.serve", (KILL, STOP)),
    "node of the actors": ("", (KILL,)),
}
PAIRS = 0.2  # share of the faults that hit two components at once
# The head listens on the loopback interface only; `ray start` would replace 127.0.0.1 by an address others can reach.
JOIN = (
    "import ray._private.services as services; services.resolve_ip_for_localhost = lambda host: host; "
    "from ray.scripts.scripts import main; main()"
)
MARK = "VOLLEY_CHAOS"  # environment variable that identifies every process started here, orphans included
PROMPTS = 8
FINISH_SECONDS = 300.0
FAILED_SECONDS = 60.0


SAMPLES = {"programs": samples, "episodes": episodes}


def common(folder: Path, steps: int) -> dict[str, Any]:
    """What the jobs have in common: two of each role, and short deadlines so that hangs are noticed soon."""
    return {
        "kind": "rl",
        "name": "chaos",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl")},
        "objective": {"kind": "max_at_k", "k": 2},
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "max_lag": 2,
        "optimizer": {"lr": 1e-6},
        "actors": {
            "count": 2,
            "cpus": 0.5,
            "resources": {"far": 1},
            "kv_cache_gb": 0.2,
            "max_replacements": 10_000,
            "group_deadline_s": 240,
            "hang_deadline_s": 20,
        },
        "learner": {"ranks": 2, "cpus_per_rank": 0.5, "step_deadline_s": 30, "max_restarts": 10_000},
        "checkpoint": {"every": 10},
        "samples_kept": 4 * PROMPTS,
        "max_dead_batches": 10**6,
    }


class Service:
    """A service started by `volley up` in its own folder, with a second node in its Ray cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, MARK: folder.name}
        done = subprocess.run(
            [
                *(VOLLEY, "up", "--dir", str(folder), "--port", "0", "--object-store-mb", "400", "--cpus", "8"),
                *("--import-from", str(Path.cwd()), "--allow-code", "*"),
            ],
            **self._started_with(),
            capture_output=True,
            text=True,
            timeout=180,
        )
        if done.returncode:
            sys.exit(f"the service did not start: {done.stderr}")
        state = json.loads((folder / "stack.json").read_text())
        self.url, self.keeper = state["server"], psutil.Process(state["keeper"])
        self._head = Path(state["private"]) / "ray" / "ray_current_cluster"
        self.node: subprocess.Popen[bytes] | None = None

    def _started_with(self) -> dict[str, Any]:
        return {"env": self.environment, "start_new_session": True}

    def join(self) -> None:
        """Add a node that reserves the resources for the actors."""
        for _ in range(60):
            if self._head.exists():
                break
            time.sleep(1)
        environment = {
            **self.environment,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray.token"),
            "RAY_worker_niceness": "0",
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        }
        with (self.folder / "logs" / "node.log").open("ab") as log:
            self.node = subprocess.Popen(
                [
                    *(sys.executable, "-c", JOIN, "start", "--block", "--node-ip-address", "127.0.0.1"),
                    *("--address", self._head.read_text().strip(), "--num-cpus", "2", "--resources", '{"far": 2}'),
                    *("--object-store-memory", str(150 << 20), "--dashboard-agent-listen-port", str(free_port())),
                ],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lose_the_node(self) -> None:
        """Kill all processes of the node at once, as when a machine fails, and start another node."""
        for process in self._tree(self.node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.node is not None:
            self.node.wait()
        self.join()

    def ask(self, method: str, path: str, **arguments: Any) -> Any:
        """Send a request to the API, retrying for a minute while it is unavailable; returns the decoded answer."""
        for _ in range(60):
            try:
                answer = httpx.request(method, f"{self.url}{path}", timeout=30, **arguments)
                if answer.status_code < 500:
                    answer.raise_for_status()
                    return answer.json()
            except httpx.TransportError:
                pass
            time.sleep(1)
        sys.exit(f"the API did not come back within 60 attempts: {method} {path}")

    def processes(self, title: str) -> list[psutil.Process]:
        """Running processes of the service whose command line contains ``title``."""
        found = []
        for process in [*self._tree(self.keeper), *self._tree(self.node)]:
            try:
                command = " ".join(process.cmdline()) or process.name()
                if title in command and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def down(self) -> list[str]:
        """Stop the service and its node; returns the names of processes that were still alive, which it kills."""
        subprocess.run([VOLLEY, "down", "--dir", str(self.folder)], check=True, timeout=300, capture_output=True)
        if self.node is not None:
            self.node.terminate()
            self.node.wait(60)
        _, alive = psutil.wait_procs(self._marked(), timeout=20)
        for process in alive:
            process.kill()
        return [process.name() for process in alive]

    def _marked(self) -> list[psutil.Process]:
        """Every process that descends from this service, whatever its parent is."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.folder.name:
                    found.append(process)
        return found

    @staticmethod
    def _tree(root: "psutil.Process | subprocess.Popen[bytes] | None") -> list[psutil.Process]:
        try:
            process = psutil.Process(root.pid) if root is not None else None
            return [process, *process.children(recursive=True)] if process is not None else []
        except psutil.NoSuchProcess:
            return []


def main() -> None:
    args = _arguments()
    signal.signal(TERM, lambda *_: sys.exit("stopped by SIGTERM"))  # the `finally` below then stops the service
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kind, inputs = SAMPLES[args.samples], folder / f"inputs-{args.samples}"
    kind.write_inputs(inputs)
    service = Service(folder / f"service-{int(time.time())}")
    try:
        service.join()
        job = kind.job_of(common(inputs, args.steps or 10**6))
        key = {"Idempotency-Key": service.folder.name}
        run = service.ask("POST", "/v1/runs", json={"job": job}, headers=key)["record"]
        print(f"run {run['id']}; logs of the service: {service.folder / 'logs'}", flush=True)
        faults = list(inject_faults(service, run["id"], args))
        steps = finish(service, run["id"], args.steps)
    finally:
        left = service.down()
    report(faults)
    check(Path(run["folder"]), steps, left, kind)


def inject_faults(service: Service, run_id: str, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Inject faults until the time is over or the run is done.

    Yields what was hit, and the seconds until the run trained again.
    """
    rng, begun = random.Random(args.seed), time.monotonic()
    wait_for_step(service, run_id, 1)
    while time.monotonic() - begun < args.minutes * 60:
        if service.ask("GET", f"/v1/runs/{run_id}")["observed"]["state"] == "done":
            break
        time.sleep(rng.uniform(*args.every))
        components = rng.sample(list(COMPONENTS), k=2 if rng.random() < PAIRS else 1)
        hit = time.monotonic()
        faults = [fault for fault in (hit_one(service, component, rng) for component in components) if fault]
        if not faults:
            continue  # the component is dead already and being restarted
        done = newest_step(service, run_id)
        recovered = wait_for_step(service, run_id, done + 2) - hit  # the first step may have been almost finished
        kind = faults[0] if len(faults) == 1 else "two at once"
        yield kind, recovered
        minutes = (time.monotonic() - begun) / 60
        print(f"{minutes:5.1f} min  step {done:5}  {' and '.join(faults):60} {recovered:6.1f} s", flush=True)


def hit_one(service: Service, component: str, rng: random.Random) -> str:
    """Send a signal to a process of ``component``; returns a description, or "" if no such process is running."""
    title, signals = COMPONENTS[component]
    number = rng.choice(signals)
    if not title:
        service.lose_the_node()
        return f"{component}, {number.name}"
    targets = service.processes(title)
    if not targets:
        return ""
    try:
        os.kill(rng.choice(targets).pid, number)
    except ProcessLookupError:
        return ""
    return f"{component}, {number.name}"


def finish(service: Service, run_id: str, steps: int | None) -> int:
    """Wait until all ``steps`` are done or, if None, stop the run where it stands; returns the steps done."""
    if steps is None:
        service.ask("POST", f"/v1/runs/{run_id}/stop")
    ends = time.monotonic() + (FINISH_SECONDS if steps is None else float("inf"))
    while (observed := service.ask("GET", f"/v1/runs/{run_id}")["observed"])["state"] not in ("done", "stopped"):
        if observed["state"] == "failed" or time.monotonic() > ends:
            sys.exit(f"the run failed or did not stop in time: {observed}")
        time.sleep(1)
    return int(observed["step"])


def wait_for_step(service: Service, run_id: str, step: int, seconds: float = 600) -> float:
    """Wait until the run has done ``step`` steps or is done; returns the monotonic time."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        observed = service.ask("GET", f"/v1/runs/{run_id}")["observed"]
        failed = observed["ended"] if observed["state"] == "failed" else None
        if failed is not None and time.time() - failed > FAILED_SECONDS:  # the supervisor may still resubmit it
            sys.exit(f"the run failed: {observed['problem']}")
        if observed["state"] == "done" or newest_step(service, run_id) >= step:
            return time.monotonic()
        time.sleep(0.5)
    sys.exit(f"no step {step} within {seconds:g} s: {service.ask('GET', f'/v1/runs/{run_id}')['observed']}")


def newest_step(service: Service, run_id: str) -> int:
    """Steps done according to the newest row of metrics; the number falls when a run resumes from a checkpoint."""
    rows = service.ask("GET", f"/v1/runs/{run_id}/metrics?names=reward_mean&points=2")
    return int(rows["steps"][-1]) + 1 if rows["steps"] else 0


def report(faults: list[tuple[str, float]]) -> None:
    """Print the faults survived by kind."""
    kinds: dict[str, list[float]] = collections.defaultdict(list)
    for kind, seconds in faults:
        kinds[kind].append(seconds)
    print(f"\n{'fault':32} {'survived':>8}   seconds until a further step: median, longest")
    for kind, each in sorted(kinds.items()):
        print(f"{kind:32} {len(each):>8}   {statistics.median(each):6.1f} {max(each):8.1f}")
    print(f"{'all':32} {len(faults):>8}")


def check(folder: Path, steps: int, left: list[str], kind: ModuleType) -> None:
    """Exit with an error unless every step was done once, every group has one end and no process is left."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    groups = [row["group"] for row in ledger]
    ends = collections.Counter(json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines())
    lost = set(range(max(groups) + 1)) - set(groups) - in_flight(folder)
    trained = [row for row in ledger if row["end"] == "trained"]
    dropped = collections.Counter(row["end"] for row in ledger if row["end"] != "trained")
    problems = [
        *([] if [row["step"] for row in metrics] == list(range(steps)) else ["a step is missing or recorded twice"]),
        *([] if len(groups) == len(set(groups)) else ["a group ended twice"]),
        *([] if len(trained) == steps * PROMPTS else [f"{len(trained)} groups were trained on"]),
        *([f"groups {sorted(lost)} were lost"] if lost else []),
        *([f"processes left: {left}"] if left else []),
        *(f"a reward was not earned: {text!r}" for text in kind.unearned(folder / "samples.jsonl")),
    ]
    print("events: " + ", ".join(f"{count} {kind}" for kind, count in sorted(ends.items())))
    print(f"steps {len(metrics)}, groups trained on {len(trained)}, dropped {sum(dropped.values())} {dict(dropped)}")
    for (what, status), count in sorted(kind.verdicts(folder / "samples.jsonl").items()):
        print(f"logged samples, {what}: {count} {status}")
    good = "every planned step done once, the ledger exact, no process left, every reward earned"
    print("; ".join(problems) or good)
    sys.exit(bool(problems))


def in_flight(folder: Path) -> set[int]:
    """Groups that the newest checkpoint keeps for a resumed run; empty if the run finished all its steps."""
    if (folder / "model").exists():
        return set()
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    return set(json.loads((newest / "run.json").read_text())["extra"]["ledger"]["in_flight"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", choices=SAMPLES, default="programs")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--steps", type=int, help="steps of the run; default: stop it after --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, nargs=2, default=(5.0, 20.0), metavar=("FROM", "TO"))
    parser.add_argument("--folder", type=Path, default=Path("demo/chaos"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
