"""k chosen per prompt from its own solve rate, compared with k = 8 for all prompts.

    python -m benchmarks.reproductions.adaptive [--seeds 1] [--steps 200] [--at-most 4]

After arXiv 2503.19595, section 3.1: the signal of max@k is densest if k is near 1/p. The solve rate p of a prompt comes
from its earlier visits, so both methods train on only 400 prompts here, each visited eight times in 200 steps.
"""

from pathlib import Path
from typing import Any

from benchmarks.reproductions import countdown
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from services.recording.display import Display

PROMPTS = 400


def subset(wanted: Options) -> Path:
    return countdown.task(wanted) / "data" / "few.jsonl"


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """Fixed and adaptive k, one run per seed."""
    path, objective, seeds = str(subset(wanted)), countdown.OBJECTIVES["max@8"], range(1, wanted.seeds + 1)
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
    if not subset(wanted).exists():
        lines = subset(wanted).with_name("train.jsonl").read_text().splitlines(keepends=True)
        subset(wanted).write_text("".join(lines[:PROMPTS]))


STUDY = Study("adaptive", inputs, countdown.warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=200)
