"""Samples per second of actors and learner side by side, and in turns on the same cores.

    python -m benchmarks.turns [--rounds 3] [--steps 30] [--model FOLDER]

The job is the workload ``short`` of the comparison with TRL, with ``--model`` its workload ``sums``. In turns, each
role has the cores that both had side by side. The ways alternate within a round; ratios are of one round.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.versus_trl.volley_side import job_of
from benchmarks.versus_trl.workloads import WORKLOADS, write_inputs
from services.jobs.job_file import assign
from services.jobs.needs import needs_of
from services.recording.display import Display
from services.runs.run import prepare, run_on
from services.signals import run_in_foreground
from services.stack.ephemeral import local_stack
from services.store.folder import RunFolder
from volley.job import JOB

WARM = 3  # steps
CORES = os.cpu_count() or 1
TURNS = {"placement": "colocated", "actors.threads": CORES, "learner.threads_per_rank": CORES}
WAYS: dict[str, dict[str, Any]] = {
    "side by side": {"actors.threads": max(1, CORES // 2), "learner.threads_per_rank": max(1, CORES // 2)},
    "in turns, object store": TURNS,
    "in turns, shared memory": {**TURNS, "broadcast.transport": "shared_memory"},
}
SHOWN = ("samples/s", "seconds_hand_over", "seconds_broadcast", "seconds_stalled_max")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model")
    args = parser.parse_args()
    workload = WORKLOADS["sums" if args.model else "short"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(workload, folder, model=args.model)
        job = {**job_of(workload, folder, ""), "steps": args.steps}
        report(run_in_foreground(measured(job, folder, args.rounds)))


async def measured(tree: dict[str, Any], folder: Path, rounds: int) -> list[dict[str, dict[str, float]]]:
    """By round and way, the figures of a run."""
    results: list[dict[str, dict[str, float]]] = []
    async with local_stack(needs_of(JOB.validate_python(tree)), folder / "stack") as stack:
        for number in range(rounds):
            results.append({})
            for way, changes in WAYS.items():
                changed = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
                for key, value in changes.items():
                    assign(changed, key.split("."), value)
                job = JOB.validate_python(changed)
                run = RunFolder.at(folder / f"run-{number}-{len(results[-1])}", job)
                await run_on(stack, prepare(job), run, Display(quiet=True))
                results[-1][way] = figures(run.read("metrics")[WARM:])
                print(f"round {number + 1}, {way}: {results[-1][way]['samples/s']:.1f} samples/s", flush=True)
    return results


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the run's steps after the first."""
    seconds = [row["seconds_step"] for row in rows]
    samples = sum(row["samples_per_second"] * row["seconds_step"] for row in rows)
    return {"samples/s": samples / sum(seconds)} | {
        name: statistics.median(row.get(name, 0.0) for row in rows) for name in SHOWN[1:]
    }


def report(rounds: list[dict[str, dict[str, float]]]) -> None:
    """Print medians over the rounds, and each way's speed relative to the first's."""
    first = next(iter(WAYS))
    print(f"\n{'':26}" + "".join(f"{name:>20}" for name in (*SHOWN, f"times {first}")))
    for way in WAYS:
        medians = [statistics.median(each[way][name] for each in rounds) for name in SHOWN]
        ratios = [each[way]["samples/s"] / each[first]["samples/s"] for each in rounds]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{way:26}" + "".join(f"{value:>20.3f}" for value in medians) + f"{ratio:>24}")


if __name__ == "__main__":
    main()
