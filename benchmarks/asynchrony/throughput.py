"""Samples per second of one job with ``max_lag`` 0, 1 and 2: how much overlapping the stages gains.

    python -m benchmarks.asynchrony.throughput [--rounds 3] [--steps 60] [--updates 1] [--folder demo/quick]

Lag 0 is the synchronous mode: generate, score, learn and broadcast, one after the other. The modes take turns on one
stack, so that other load on the machine affects all of them. The first ten steps of a run are not counted. The job is
the countdown example's, in which generation takes twice as long as learning; with ``--updates 2`` per batch they take
about equally long. The model comes from a short warm-up run, done once under ``--folder``. With lag, a run can be as
fast as its longer stage: "limit" is the speed-up this would give, from the seconds per stage at lag 0.
"""

import argparse
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.countdown.demo import QUICK, job_of, make_inputs, run_one
from services.jobs.needs import needs_of
from services.recording.display import Display
from services.signals import run_in_foreground
from services.stack.ephemeral import Stack, local_stack
from volley.job import RLJob

LAGS = (0, 1, 2)
WARM = 10  # steps
STAGES = ("seconds_wait", "seconds_learn", "seconds_publish", "seconds_broadcast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--updates", type=int, default=1, help="optimiser updates per batch")
    parser.add_argument("--folder", type=Path, default=Path("demo/quick"))
    args = parser.parse_args()
    display = Display()
    make_inputs(args.folder.resolve(), display, heldout=50)
    report(run_in_foreground(measure(args.folder.resolve(), args.rounds, args.steps, display, updates=args.updates)))


async def measure(
    folder: Path, rounds: int, steps: int, display: Display, lags: Sequence[int] = LAGS, updates: int = 1
) -> dict[int, list[dict[str, float]]]:
    """For each lag, one row of means per round."""
    results: dict[int, list[dict[str, float]]] = {lag: [] for lag in lags}
    async with local_stack(needs_of(job_of(folder, "mean", {})), folder / "stack") as stack:
        if not (folder / "warm-up" / "model").exists():
            await run_one(stack, folder, "warm-up", job_of(folder, "warm-up", QUICK["warm-up"]), display)
        for _ in range(rounds):
            for lag in lags:
                results[lag].append(await run_with_lag(stack, folder, lag, steps, updates))
                display.say(f"lag {lag}: {results[lag][-1]['samples_per_second']:.0f} samples/s")
    return results


async def run_with_lag(stack: Stack, folder: Path, lag: int, steps: int, updates: int) -> dict[str, float]:
    """Run the job once; return the means over the counted steps."""
    changes: dict[str, Any] = {"max_lag": lag, "steps": steps, "evaluation": None, "samples_kept": 0}
    job = RLJob.model_validate(
        {**job_of(folder, "mean", {"update.updates_per_batch": updates}).model_dump(), **changes}
    )
    name = f"lag-{lag}"
    run = await run_one(stack, folder, name, job, Display(quiet=True))
    rows = run.read("metrics")[WARM:]
    shutil.rmtree(run.path)
    samples = len(rows) * job.prompts_per_step * job.sampling.n
    means = {each: float(np.mean([row[each] for row in rows])) for each in ("seconds_step", *STAGES)}
    return {**means, "samples_per_second": samples / (len(rows) * means["seconds_step"])}


def report(results: dict[int, list[dict[str, float]]]) -> None:
    """Print the medians, and each lag's ratio to lag 0 of the same round."""
    print(f"{'lag':>4} {'samples/s':>10} {'ratio to lag 0':>24}   wait   learn  publish  broadcast (s)")
    base = [row["samples_per_second"] for row in results[0]]
    for lag, rows in results.items():
        speeds = [row["samples_per_second"] for row in rows]
        ratios = [ours / theirs for ours, theirs in zip(speeds, base, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        stages = "  ".join(f"{statistics.median(row[stage] for row in rows):6.3f}" for stage in STAGES)
        print(f"{lag:>4} {statistics.median(speeds):>10.0f} {spread:>24}   {stages}")
    limits = [row["seconds_step"] / longer_stage(row) for row in results[0]]
    print(f"limit: {statistics.median(limits):.2f}")


def longer_stage(row: dict[str, float]) -> float:
    """The longer of two durations in a step: generation with scoring, or learning with publishing; seconds."""
    return max(row["seconds_wait"], row["seconds_learn"] + row["seconds_publish"])


if __name__ == "__main__":
    main()
