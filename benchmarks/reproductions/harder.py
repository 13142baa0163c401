"""A harder countdown, with five numbers per prompt and a shorter warm-up: which objective learns prompts that are
hardly ever solved?

    python -m benchmarks.reproductions.harder [--seeds 1] [--steps 200] [--at-most 4]

After arXiv 2505.15201, figure 5: the mean stalls when most groups have no success, while max@k keeps improving.
"""

from pathlib import Path

from benchmarks.reproductions import countdown
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from services.recording.display import Display

NUMBERS, WARM_UP = 5, 250


def task(wanted: Options) -> Path:
    return countdown.task(wanted, NUMBERS)


def inputs(wanted: Options, display: Display) -> None:
    countdown.inputs(wanted, display, NUMBERS)


def warm_up(wanted: Options) -> Planned:
    return countdown.warm_up(wanted, NUMBERS, WARM_UP)


STUDY = Study("harder", task, inputs, warm_up)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
