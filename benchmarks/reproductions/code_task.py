"""Small Python functions inferred from examples and judged in the sandbox: does the model's pass rate rise?

    python -m benchmarks.reproductions.code_task [--seeds 1] [--steps 100] [--at-most 4]

An untrained model of 0.8 million parameters is warmed up by supervised steps on programs, then trained only on the
verdicts of the ``code`` scorer: eight assertions, five of which the prompt does not show.
"""

from functools import partial
from pathlib import Path

from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from benchmarks.reproductions.tasks import make_once, run_module, warm_up_run
from services.recording.display import Display

WARM_UP = 300


def task(wanted: Options) -> Path:
    return wanted.folder / "programs"


def inputs(wanted: Options, display: Display) -> None:
    """Make the data and an untrained model, unless they exist."""
    make = partial(run_module, "benchmarks.reproductions.programs")
    make_once(task(wanted) / "data", "programs", display, make)


def warm_up(wanted: Options) -> Planned:
    """The supervised run on programs that all others start from."""
    return warm_up_run(task(wanted), WARM_UP, name="programs-warm-up", rows_per_step=64)


STUDY = Study("code_task", task, inputs, warm_up)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
