"""Samples per second against TRL's `GRPOTrainer`, on four workloads.

    python -m benchmarks.versus_trl.run [short long code judge] [--rounds 3] [--folder demo/versus_trl]

Both sides take turns, each in a process of its own, on the same model, prompts, number and length of samples and
optimiser steps; start-up and the first three steps are not counted. The ratio is taken round by round.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.versus_trl.workloads import PROMPTS, SAMPLES, WORKLOADS, judge, write_inputs

WARM = 3  # steps
SIDES = ("trl", "volley")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", type=_known, metavar="WORKLOAD", help="default: all four")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("demo/versus_trl"))
    args = parser.parse_args()
    print(f"{'workload':10} {'TRL':>10} {'Volley':>10}   samples/s, medians      ratio (each round)", flush=True)
    results = {}
    for name in args.workloads or WORKLOADS:
        folder = args.folder.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        write_inputs(WORKLOADS[name], folder)
        speeds: dict[str, list[float]] = {side: [] for side in SIDES}
        with judge() if WORKLOADS[name].reward == "judge" else contextlib.nullcontext("") as url:
            for _ in range(args.rounds):
                for side in SIDES:
                    speeds[side].append(speed(side, name, folder, url))
        results[name] = speeds
        print(line(name, speeds), flush=True)
        (args.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")


def _known(name: str) -> str:
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    return name


def speed(side: str, name: str, folder: Path, url: str) -> float:
    """Samples per second of one run."""
    with tempfile.TemporaryDirectory() as outputs:
        out = Path(outputs) / "seconds.json"
        command = [sys.executable, "-m", f"benchmarks.versus_trl.{side}_side", name, str(folder), str(out)]
        done = subprocess.run([*command, *([url] if url else [])], capture_output=True, text=True, timeout=1800)
        if done.returncode:
            sys.exit(f"{side} on {name} failed:\n{done.stderr[-3000:]}")
        seconds = json.loads(out.read_text())[WARM:]
    return float(len(seconds) * PROMPTS * SAMPLES / sum(seconds))


def line(name: str, speeds: dict[str, list[float]]) -> str:
    """One row of the table."""
    ratios = [ours / theirs for ours, theirs in zip(speeds["volley"], speeds["trl"], strict=True)]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    medians = [statistics.median(speeds[side]) for side in SIDES]
    return f"{name:10} {medians[0]:>10.1f} {medians[1]:>10.1f} {statistics.median(ratios):>24.2f}x  ({each})"


if __name__ == "__main__":
    main()
