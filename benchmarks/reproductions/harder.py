"""A harder countdown, with five numbers per prompt and a shorter warm-up: which objective learns prompts that are
hardly ever solved?

    python -m benchmarks.reproductions.harder [--seeds 1] [--steps 200] [--at-most 4]

After arXiv 2505.15201, figure 5: the mean stalls when most groups have no success, while max@k keeps improving.
"""

from benchmarks.reproductions import countdown
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from services.recording.display import Display

NUMBERS, WARM_UP = 5, 250
METHODS = ("mean", "max@8")


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """The mean and max@8, one run per seed."""
    return {
        name: [
            countdown.trained(wanted, name, seed, numbers=NUMBERS, first=(name, seed) == ("mean", 1))
            for seed in range(1, wanted.seeds + 1)
        ]
        for name in METHODS
    }


def inputs(wanted: Options, display: Display) -> None:
    countdown.inputs(wanted, display, NUMBERS)


def warm_up(wanted: Options) -> Planned:
    return countdown.warm_up(wanted, NUMBERS, WARM_UP)


STUDY = Study("harder", inputs, warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=200)
