"""k of each prompt from its own solve rate, against k = 8 for all.

    python -m benchmarks.reproductions.adaptive [--seeds 1] [--steps 200] [--at-most 4]

After arXiv 2503.19595, section 3.1: the signal of max@k is densest where k is near 1/p. Only earlier visits of a prompt
count, so both methods train on 400 prompts here, each of which is met eight times in 200 steps.
"""

from pathlib import Path
from typing import Any

from benchmarks.reproductions import countdown
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from services.display import Display

PROMPTS = 400


def few(wanted: Options) -> Path:
    return countdown.task(wanted) / "data" / "few.jsonl"


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """Fixed and adaptive k, one run a seed."""
    path, objective, seeds = str(few(wanted)), countdown.OBJECTIVES["max@8"], range(1, wanted.seeds + 1)
    fixed = [
        countdown.trained(wanted, "fixed-k", seed, first=seed == 1, data__path=path, objective=objective)
        for seed in seeds
    ]
    schedule: dict[str, Any] = {"adaptive_k": {}}
    adaptive = [
        countdown.trained(wanted, "adaptive-k", seed, data__path=path, objective=objective, schedule=schedule)
        for seed in seeds
    ]
    return {"k = 8": fixed, "k = 1/p": adaptive}


def inputs(wanted: Options, display: Display) -> None:
    countdown.inputs(wanted, display)
    if not few(wanted).exists():
        lines = (few(wanted).with_name("train.jsonl")).read_text().splitlines(keepends=True)
        few(wanted).write_text("".join(lines[:PROMPTS]))


STUDY = Study("adaptive", inputs, countdown.warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=200)
