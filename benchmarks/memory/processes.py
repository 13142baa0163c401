"""Memory of each process of a run: how it grows with the model, or what a run of a given model takes.

    python -m benchmarks.memory.processes [--shapes 4x256 8x768] [--steps 3]
    python -m benchmarks.memory.processes --model MODEL [--steps 3] [--set placement=colocated ...]

The first runs the first workload of the comparison with TRL on random models of two shapes (layers x width, float32)
and prints each process's peak, and by how many bytes it grew per additional byte of weights, which leaves out what the
libraries need.

The second runs the job of `make demo-llm` for a few steps with a folder's model in float32, and prints per kind of
process its peak and, at the moment when all processes together took most, its share: memory that processes share is
divided by their number, so that these add up. It also prints how much Ray spilled, how long a step took, and
`benchmarks.memory.step`. ``--set`` changes the job.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.objectives.report import print_table
from benchmarks.versus_trl.volley_side import job_of
from benchmarks.versus_trl.workloads import WORKLOADS, write_inputs
from services.jobs.job_file import load_job
from services.recording.display import Display
from services.runs.run import prepare, run_alone
from services.signals import run_in_foreground
from services.store.folder import RunFolder

MIB, FLOAT32 = 2**20, 4
LOOK_SECONDS = 0.2
SMOLLM2 = Path("examples/smollm2/job.yaml")
NAMES = {  # part of a command line -> name of the process
    "ray::Rank": "learner rank",
    "ray::Actor": "actor",
    "VLLM": "vLLM engine",
    "RewardWorker": "reward worker",
    "SpillWorker": "Ray's spill worker",
    "raylet": "raylet",
    "gcs_server": "Ray's head service",
    "redis": "Redis",
    "benchmarks.memory": "driver",
}
OTHERS = "all others"  # the forking server, the sandbox and its programs, Ray's agents


@dataclass(slots=True)
class Seen:
    """What was seen of a run's processes, in bytes.

    Attributes:
        peaks: by kind, the largest resident memory that one process ever had.
        most: by kind, the proportional shares at the moment when their sum was largest.
        spilled: the most that Ray's spilled objects took on the disk.
        step_seconds: of each step.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    spilled: int = 0
    step_seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs=2, default=["4x256", "8x768"], metavar="LAYERSxWIDTH")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to the job of --model")
    args = parser.parse_args()
    if args.model is not None:
        measure_model(
            args.model,
            args.steps,
            {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in args.set)},
        )
    else:
        measure_shapes(args.shapes, args.steps)


def measure_shapes(shapes: list[str], steps: int) -> None:
    """Run the workload with a model of each shape, and print a table."""
    weights, peaks = [], []
    for shape in shapes:
        layers, width = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(WORKLOADS["short"], Path(folder), layers=layers, width=width)
            weights.append((Path(folder) / "model" / "model.safetensors").stat().st_size)
            file = Path(folder) / "job.yaml"
            file.write_text(json.dumps(job_of(WORKLOADS["short"], Path(folder), "")))
            peaks.append(seen_of_run(file, Path(folder), {"steps": steps}).peaks)
    report(weights, peaks)


def measure_model(model: Path, steps: int, changes: dict[str, Any]) -> None:
    """Run the job of the demo with ``model``, and a rank's step beside a plain loop, and print two tables."""
    own = {"model.path": str(model.resolve()), "steps": steps, "evaluation.data.size": 4, "checkpoint.every": steps}
    with tempfile.TemporaryDirectory() as folder:
        seen = seen_of_run(SMOLLM2, Path(folder), {**own, **changes})
    parameters = sum(file.stat().st_size for file in model.glob("*.safetensors")) // FLOAT32
    rows = [
        (name, round(peak / MIB), round(seen.most.get(name, 0) / MIB), peak / parameters)
        for name, peak in sorted(seen.peaks.items(), key=lambda item: -item[1])
    ]
    print(f"{parameters / 1e6:.0f} million parameters, weights of {FLOAT32 * parameters / MIB:.0f} MiB\n")
    print_table(("process", "peak MiB of one", "share MiB of all", "peak, bytes per parameter"), rows)
    total, spilled_mib = sum(seen.most.values()) / MIB, seen.spilled / MIB
    print(f"\nAll at once took {total:.0f} MiB at most. Ray spilled {spilled_mib:.0f} MiB.")
    print(f"Seconds of each step: {', '.join(f'{seconds:.1f}' for seconds in seen.step_seconds)}.\n", flush=True)
    subprocess.run([sys.executable, "-m", "benchmarks.memory.step", str(model)], check=True)


def seen_of_run(file: Path, folder: Path, changes: dict[str, Any]) -> Seen:
    """Run the job in ``file`` with its run folder in ``folder``."""
    job = load_job(file, changes)
    seen, ended = Seen(), threading.Event()
    watching = threading.Thread(target=watch, args=(seen, ended))
    watching.start()
    try:
        run = RunFolder.create(folder, job)
        run_in_foreground(run_alone(prepare(job), run, Display(quiet=True)))
        seen.step_seconds = [row["seconds_step"] for row in run.read("metrics")]
    finally:
        ended.set()
        watching.join()
    return seen


def watch(seen: Seen, ended: threading.Event) -> None:
    """Look at this process and its descendants until ``ended`` is set."""
    own = psutil.Process()
    while not ended.wait(LOOK_SECONDS):
        shares: dict[str, int] = {}
        for process in (own, *own.children(recursive=True)):
            try:
                name, peak, share = name_of(process), *memory_of(process.pid)
            except (psutil.Error, OSError):
                continue  # it has just ended
            seen.peaks[name] = max(seen.peaks.get(name, 0), peak)
            shares[name] = shares.get(name, 0) + share
        if sum(shares.values()) > sum(seen.most.values()):
            seen.most = shares
        with suppress(OSError):  # an object was just removed
            seen.spilled = max(seen.spilled, spilled())


def memory_of(pid: int) -> tuple[int, int]:
    """Peak resident memory and proportional share of a process, in bytes."""
    fields = {}
    for file in ("status", "smaps_rollup"):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = value
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "Pss"))  # type: ignore[return-value]


def spilled() -> int:
    """Bytes of the objects that Ray has on the disk."""
    from ray._private.worker import global_worker

    if global_worker.node is None:
        return 0
    folders = Path(global_worker.node.get_session_dir_path()).glob("ray_spilled_objects*")
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())


def name_of(process: psutil.Process) -> str:
    """The kind of process in a run."""
    command = " ".join(process.cmdline())
    return next((name for mark, name in NAMES.items() if mark in command), OTHERS)


def report(weights: list[int], peaks: list[dict[str, int]]) -> None:
    """Print one row per kind of process."""
    small, large = peaks
    print(f"weights: {weights[0] / MIB:.0f} and {weights[1] / MIB:.0f} MiB\n")
    rows = [
        (
            name,
            round(small[name] / MIB),
            round(large[name] / MIB),
            (large[name] - small[name]) / (weights[1] - weights[0]),
        )
        for name in NAMES.values()
        if name in small and name in large
    ]
    print_table(("process", "peak MiB, first", "peak MiB, second", "bytes per byte of weights"), rows)


if __name__ == "__main__":
    main()
