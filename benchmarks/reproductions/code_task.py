"""Small Python functions from examples, judged in the sandbox: the pass rate of a model that writes them rises.

    python -m benchmarks.reproductions.code_task [--seeds 1] [--steps 100] [--at-most 4]

An untrained model of 0.8 million parameters is warmed up by supervised steps on programs, then trained on the verdicts
of the ``code`` scorer alone: eight assertions, five of them hidden from it.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.reproductions.countdown import EXAMPLES, OBJECTIVES
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from services.display import Display
from services.job_file import load_job

WARM_UP = 300
METHODS = ("mean",)
PROMPTS, RATE, RISING = 8, 1.5e-4, 10
LONGEST = 34  # tokens of a right program, and its end


def task(wanted: Options) -> Path:
    return wanted.folder / "programs"


def inputs(wanted: Options, display: Display) -> None:
    """Data and an untrained model, unless they are there."""
    data = task(wanted) / "data"
    if not (data / "done").exists():
        display.say("making programs and an untrained model")
        make = [sys.executable, "-m", "benchmarks.reproductions.programs", str(data)]
        subprocess.run(make, check=True, capture_output=True)  # a process of its own: torch stays out of this one
        (data / "done").touch()


def warm_up(wanted: Options) -> Planned:
    """Supervised steps on programs."""
    data = task(wanted) / "data"
    settings = {
        "name": "programs-warm-up",
        "data.path": str(data / "sft.jsonl"),
        "model.path": str(data / "untrained"),
        "steps": WARM_UP,
        "rows_per_step": 64,
    }
    return Planned(task(wanted) / "warm-up", load_job(EXAMPLES / "sft.yaml", settings))


def trained(wanted: Options, name: str, seed: int) -> Planned:
    """A run for the objective ``name``."""
    folder = task(wanted)
    settings: dict[str, Any] = {
        "name": f"programs-{name}-{seed}".replace("@", "-"),
        "seed": seed,
        "steps": wanted.steps,
        "prompts_per_step": PROMPTS,
        "optimizer": {"lr": RATE, "warmup_steps": RISING},
        "samples_kept": 16,
        "model.path": str(folder / "warm-up" / "model"),
        "data.path": str(folder / "data" / "train.jsonl"),
        "scorer": {"kind": "code", "extract": "raw", "values": {"passed": 1, "failed": 0}},
        "objective": OBJECTIVES[name],
        "sampling.max_tokens": LONGEST,
        "actors.max_num_seqs": 256,
        "evaluation.data.path": str(folder / "data" / "heldout.jsonl"),
        "evaluation.sampling": {"n": 16, "max_tokens": LONGEST},
        "evaluation.ks": [1, 2, 4, 8, 16],
        "reward_workers.count": 2,  # scoring is what takes longest
        "evaluation.at_start": (name, seed) == ("mean", 1),
    }
    return Planned(folder / settings["name"], load_job(EXAMPLES / "max8.yaml", settings))


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """One run a seed for each objective."""
    return {name: [trained(wanted, name, seed) for seed in range(1, wanted.seeds + 1)] for name in METHODS}


STUDY = Study("code_task", inputs, warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=100)
