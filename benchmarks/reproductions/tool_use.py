"""Products that need a tool, learned by mean and max@4 from a warm-up that calls it half the time.

    python -m benchmarks.reproductions.tool_use [--seeds 3] [--steps 60] [--at-most 4]

A model of 1.9 million parameters is asked for products of three-digit numbers, which it can neither compute nor
remember. In its warm-up it saw the tool called in every second conversation, and a guess in the others. Training sees
only whether the last answer is right.
"""

from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.objectives.report import panels, print_table, save
from benchmarks.reproductions.results import Rows, curve, draw_curves, draw_pass_at_k
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study
from benchmarks.reproductions.tasks import make_once, run_module, warm_up_run
from services.recording.display import Display

WARM_UP = 300


def task(wanted: Options) -> Path:
    return wanted.folder / "products"


def inputs(wanted: Options, display: Display) -> None:
    """Make the data and an untrained model, unless they exist."""
    make = partial(run_module, "benchmarks.reproductions.products")
    make_once(task(wanted) / "data", "products", display, make)


def warm_up(wanted: Options) -> Planned:
    """The supervised run that all others start from."""
    return warm_up_run(task(wanted), WARM_UP, name="products-warm-up", rows_per_step=64)


def draw(name: str, wanted: Options, rows: Rows, runs: Runs) -> None:
    """Plot held-out pass@k and, against steps, pass@1 and calls per episode: two if the model uses the tool."""
    figure, (by_k, right, calls) = panels(3)
    draw_pass_at_k(by_k, rows)
    draw_curves(right, runs, "pass_at_1", "right answers, % of training samples")
    draw_curves(calls, runs, "calls_mean", "calls of the model per episode", scale=1)
    by_k.legend(frameon=False)
    save(figure, wanted.out, name)
    print_table(
        ["calls per episode", "first steps", "last steps"],
        [
            [method, *(f"{float(np.mean(curve(of_method, 'calls_mean')[:, at])):.2f}" for at in (0, -1))]
            for method, of_method in runs.items()
        ],
    )


STUDY = Study("tool_use", task, inputs, warm_up, draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
