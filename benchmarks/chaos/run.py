"""A run on the whole service while its processes are killed and stopped at random; it must end as if nothing had been.

    python -m benchmarks.chaos.run [--minutes 30] [--steps 3000] [--seed 0] [--every 5 20] [--folder demo/chaos]

Starts a service of its own (`volley up`), submits a job with sandboxed code as its reward, and until the run is done
(or the minutes are over: then it only waits for the end) every few seconds picks a component and sends one of its
processes SIGKILL or SIGSTOP. At the end it checks that every planned step was trained once, that the ledger is exact,
and that no process is left, and prints the faults survived by kind, with the time until the run trained again.
"""

import argparse
import collections
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
from typing import Any

import httpx
import psutil

from benchmarks.versus_trl.workloads import WORKLOADS, write_inputs

VOLLEY = str(Path(sys.executable).with_name("volley"))
# Component -> what its process is called, and what it is sent. Ray and the API are not stopped, only killed: the keeper
# gives a silent server a minute before it acts, which is tested elsewhere.
COMPONENTS: dict[str, tuple[str, tuple[signal.Signals, ...]]] = {
    "actor": ("ray::Actor", (signal.SIGKILL, signal.SIGSTOP)),
    "engine in an actor": ("VLLM::EngineCore", (signal.SIGKILL, signal.SIGSTOP)),
    "reward worker": ("ray::RewardWorker", (signal.SIGKILL, signal.SIGSTOP)),
    "sandbox child": ("bwrap", (signal.SIGKILL, signal.SIGSTOP)),
    "learner rank": ("ray::Rank", (signal.SIGKILL, signal.SIGSTOP)),
    "driver": ("services.driver", (signal.SIGKILL,)),
    "Redis": ("redis-server", (signal.SIGKILL,)),
    "API and supervisor": ("services.api.serve", (signal.SIGKILL,)),
}
PROMPTS = 8


def job_of(folder: Path, steps: int) -> dict[str, Any]:
    """Two of everything, and deadlines that make a hang short."""
    return {
        "kind": "rl",
        "name": "chaos",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl")},
        "scorer": {"kind": "code", "extract": "raw"},
        "objective": {"kind": "max_at_k", "k": 2},
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "max_lag": 2,
        "sampling": {"n": 4, "max_tokens": 8},
        "optimizer": {"lr": 1e-6},
        "actors": {"count": 2, "cpus": 0.5, "kv_cache_gb": 0.2, "max_replacements": 10_000, "group_deadline_s": 60},
        "reward_workers": {"count": 2, "max_replacements": 10_000, "group_deadline_s": 20},
        "learner": {"ranks": 2, "cpus_per_rank": 0.5, "step_deadline_s": 30, "max_restarts": 10_000},
        "checkpoint": {"every": 10},
        "max_dead_batches": 10**6,
    }


class Service:
    """`volley up` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done = subprocess.run(
            [VOLLEY, "up", "--dir", str(folder), "--port", "0"], capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            sys.exit(f"the service does not start: {done.stderr}")
        state = json.loads((folder / "stack.json").read_text())
        self.url, self.keeper = state["server"], psutil.Process(state["keeper"])

    def ask(self, method: str, path: str, **arguments: Any) -> Any:
        """The API's answer; asked again while it is away."""
        for _ in range(60):
            try:
                answer = httpx.request(method, f"{self.url}{path}", timeout=10, **arguments)
                if answer.status_code < 500:
                    answer.raise_for_status()
                    return answer.json()
            except httpx.TransportError:
                pass
            time.sleep(1)
        sys.exit(f"the API does not come back: {method} {path}")

    def processes(self, title: str) -> list[psutil.Process]:
        """Those of the service whose command names ``title``."""
        found = []
        for process in self.keeper.children(recursive=True):
            try:
                command = " ".join(process.cmdline()) or process.name()
                if title in command and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def down(self) -> list[str]:
        """End it; the names of processes that stayed."""
        everything = [self.keeper, *self.keeper.children(recursive=True)]
        subprocess.run([VOLLEY, "down", "--dir", str(self.folder)], check=True, timeout=180, capture_output=True)
        _, alive = psutil.wait_procs(everything, timeout=20)
        return [process.name() for process in alive]


def main() -> None:
    args = _arguments()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(WORKLOADS["code"], folder / "inputs", layers=2, width=128)
    service = Service(folder / f"service-{int(time.time())}")
    try:
        job, key = {"job": job_of(folder / "inputs", args.steps)}, {"Idempotency-Key": service.folder.name}
        run = service.ask("POST", "/v1/runs", json=job, headers=key)["record"]
        print(f"run {run['id']}: {args.steps} steps; log of the service: {service.folder / 'logs'}", flush=True)
        faults = list(torment(service, run["id"], args))
    finally:
        left = service.down()
    report(faults)
    check(Path(run["folder"]), args.steps, left)


def torment(service: Service, run_id: str, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Faults until the run has ended: what was hit, and seconds until the run trained again."""
    rng, begun = random.Random(args.seed), time.monotonic()
    wait_for_step(service, run_id, 1)
    while service.ask("GET", f"/v1/runs/{run_id}")["observed"]["state"] not in ("done", "failed", "stopped"):
        time.sleep(rng.uniform(*args.every))
        if time.monotonic() - begun > args.minutes * 60:
            continue
        component = rng.choice(list(COMPONENTS))
        title, signals = COMPONENTS[component]
        targets, number = service.processes(title), rng.choice(signals)
        if not targets:
            continue  # it is dead already, and on its way back
        hit = time.monotonic()
        try:
            os.kill(rng.choice(targets).pid, number)
        except ProcessLookupError:
            continue
        done = newest_step(service, run_id)
        recovered = wait_for_step(service, run_id, done + 2) - hit  # one step may have been on its way
        yield f"{component}, {number.name}", recovered
        minutes = (time.monotonic() - begun) / 60
        print(f"{minutes:5.1f} min  step {done:5}  {component:20} {number.name}  {recovered:6.1f} s", flush=True)


def wait_for_step(service: Service, run_id: str, step: int, seconds: float = 600) -> float:
    """When the run had done ``step`` steps, or had ended."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        observed = service.ask("GET", f"/v1/runs/{run_id}")["observed"]
        if observed["state"] == "failed":
            sys.exit(f"the run failed: {observed['problem']}")
        if observed["state"] == "done" or newest_step(service, run_id) >= step:
            return time.monotonic()
        time.sleep(0.5)
    sys.exit(f"no step {step} within {seconds:g} s: {service.ask('GET', f'/v1/runs/{run_id}')['observed']}")


def newest_step(service: Service, run_id: str) -> int:
    """Steps done by the newest row of metrics; fewer than before while a run goes on from a checkpoint."""
    rows = service.ask("GET", f"/v1/runs/{run_id}/metrics?names=reward_mean&points=2")
    return int(rows["steps"][-1]) + 1 if rows["steps"] else 0


def report(faults: list[tuple[str, float]]) -> None:
    """Faults survived by kind."""
    kinds: dict[str, list[float]] = collections.defaultdict(list)
    for kind, seconds in faults:
        kinds[kind].append(seconds)
    print(f"\n{'fault':32} {'survived':>8}   seconds until a further step: median, longest")
    for kind, each in sorted(kinds.items()):
        print(f"{kind:32} {len(each):>8}   {statistics.median(each):6.1f} {max(each):8.1f}")
    print(f"{'all':32} {len(faults):>8}")


def check(folder: Path, steps: int, left: list[str]) -> None:
    """Exit with an error unless every step and every group is where it belongs."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    groups = [row["group"] for row in ledger]
    trained = [row for row in ledger if row["end"] == "trained"]
    dropped = collections.Counter(row["end"] for row in ledger if row["end"] != "trained")
    problems = [
        *([] if [row["step"] for row in metrics] == list(range(steps)) else ["a step is missing, or there twice"]),
        *([] if len(groups) == len(set(groups)) else ["a group ended twice"]),
        *([] if len(trained) == steps * PROMPTS else [f"{len(trained)} groups were trained on"]),
        *([] if sorted(groups) == list(range(len(groups))) else ["a group was lost"]),
        *([f"processes left: {left}"] if left else []),
    ]
    print(f"steps {len(metrics)}, groups trained on {len(trained)}, dropped {sum(dropped.values())} {dict(dropped)}")
    print("every planned step done once, the ledger exact, no process left" if not problems else "; ".join(problems))
    sys.exit(bool(problems))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, nargs=2, default=(5.0, 20.0), metavar=("FROM", "TO"))
    parser.add_argument("--folder", type=Path, default=Path("demo/chaos"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
