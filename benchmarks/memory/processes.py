"""Peak resident memory of each process of a run, as a function of model size.

    python -m benchmarks.memory.processes [--shapes 4x256 8x768] [--steps 3]

It runs the first workload of the comparison with TRL on random models of two shapes (layers x width, float32) and
prints each process's peak, and by how many bytes it grew per additional byte of weights, which leaves out what the
libraries need. Memory shared between processes counts in each of them.
"""

import argparse
import json
import tempfile
import threading
from pathlib import Path

import psutil

from benchmarks.objectives.report import print_table
from benchmarks.versus_trl.volley_side import job_of
from benchmarks.versus_trl.workloads import WORKLOADS, write_inputs
from services.jobs.job_file import load_job
from services.recording.display import Display
from services.runs.run import prepare, run_alone
from services.signals import run_in_foreground
from services.store.folder import RunFolder

MIB = 2**20
LOOK_SECONDS = 0.2
NAMES = {  # part of a command line -> name of the process
    "ray::Rank": "learner rank",
    "ray::Actor": "actor",
    "VLLM": "vLLM engine",
    "ray::RewardWorker": "reward worker",
    "raylet": "raylet",
    "gcs_server": "Ray's head service",
    "redis": "Redis",
    "benchmarks.memory": "driver",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs=2, default=["4x256", "8x768"], metavar="LAYERSxWIDTH")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    weights, peaks = [], []
    for shape in args.shapes:
        layers, width = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(WORKLOADS["short"], Path(folder), layers=layers, width=width)
            weights.append((Path(folder) / "model" / "model.safetensors").stat().st_size)
            peaks.append(peaks_of_run(Path(folder), args.steps))
    report(weights, peaks)


def peaks_of_run(folder: Path, steps: int) -> dict[str, int]:
    """Run the job; returns the peak memory of each kind of process in bytes, that of the largest of its kind."""
    file = folder / "job.yaml"
    file.write_text(json.dumps({**job_of(WORKLOADS["short"], folder, ""), "steps": steps}))
    job = load_job(file)
    peaks: dict[str, int] = {}
    ended = threading.Event()
    watching = threading.Thread(target=watch, args=(peaks, ended))
    watching.start()
    try:
        run = RunFolder.create(folder, job)
        run_in_foreground(run_alone(prepare(job), run, Display(quiet=True)))
    finally:
        ended.set()
        watching.join()
    return peaks


def watch(peaks: dict[str, int], ended: threading.Event) -> None:
    """Record the peaks of this process and its descendants until ``ended`` is set."""
    own = psutil.Process()
    while not ended.wait(LOOK_SECONDS):
        for process in (own, *own.children(recursive=True)):
            try:
                name, resident = name_of(process), process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
            if name:
                peaks[name] = max(peaks.get(name, 0), resident)


def name_of(process: psutil.Process) -> str:
    """The process's name in a run; "" for helper processes."""
    command = " ".join(process.cmdline())
    return next((name for mark, name in NAMES.items() if mark in command), "")


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
