"""One workload with Volley's whole stack: writes the seconds of each step as JSON.

    python -m benchmarks.versus_trl.volley_side WORKLOAD FOLDER OUT.json [JUDGE_URL] [--set KEY=VALUE]

One actor and one learner rank have one thread each; prompts, samples, lengths and optimiser steps are those of the TRL
side. Token-level correction and lag 1 are a job's defaults; workload ``judge``, whose reward is slow, has lag 2.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.versus_trl.workloads import SAMPLES, WORKLOADS, Workload
from services.jobs.job_file import load_job, parse_overrides
from services.recording.display import Display
from services.runs.run import prepare, run_alone
from services.signals import run_in_foreground
from services.store.folder import RunFolder


def job_of(workload: Workload, folder: Path, url: str) -> dict[str, Any]:
    """The workload's job, as a user would write it."""
    scorers: dict[str, dict[str, Any]] = {
        "free": {"kind": "python", "target": "benchmarks.versus_trl.volley_side:free"},
        "code": {"kind": "code", "extract": "raw"},
        "judge": {"kind": "http", "url": url},
    }
    slow_rewards: dict[str, dict[str, Any]] = {
        "free": {},
        "code": {"reward_workers": {"count": 2}},  # judges as many programs at once as the TRL side
        "judge": {"max_lag": 2, "reward_workers": {"count": 2 * workload.prompts}},  # these workers only wait
    }
    return {
        "kind": "rl",
        "name": workload.name,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl")},
        "scorer": scorers[workload.reward],
        "objective": {"kind": "mean", "center": True, "normalize": "std"},
        "steps": workload.steps,
        "prompts_per_step": workload.prompts,
        "sampling": {"n": SAMPLES, "max_tokens": workload.max_tokens},
        "optimizer": {"lr": 1e-6},
        "actors": {"max_num_seqs": 2 * workload.prompts * SAMPLES, "kv_cache_gb": 0.5},
        "max_dead_batches": 10**6,
        "samples_kept": 0,
        **slow_rewards[workload.reward],
    }


def free(sample: str, row: dict[str, Any]) -> float:
    """The reward that costs nothing."""
    from benchmarks.versus_trl.workloads import share_of_even

    return share_of_even(sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=WORKLOADS.__getitem__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        file = Path(runs) / "job.yaml"
        file.write_text(json.dumps(job_of(args.workload, args.folder, args.url)))
        job = load_job(file, parse_overrides(args.set))
        run = RunFolder.create(Path(runs), job)
        run_in_foreground(run_alone(prepare(job), run, Display(quiet=True)))
        args.out.write_text(json.dumps([row["seconds_step"] for row in run.read("metrics")]))


if __name__ == "__main__":
    main()
