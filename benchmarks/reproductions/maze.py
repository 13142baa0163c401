"""Mazes, after arXiv 2602.02710: which objective is best for one try and for many?

    python -m benchmarks.reproductions.maze [--seeds 3] [--steps 100] [--at-most 4]

A Qwen2 model of 3.9 million parameters first learns from solved mazes, then from right and wrong paths, with n = 64.
The published mazes have 17 x 17 cells and n = 128; these have 9 x 9, for two cores. All methods have the same rate: at
the next larger one of `maze_rates`, which is better for some over 40 steps, they lose pass@k over 100.
With rewards of 0 and 1, TailRL (arXiv 2609.02987) and the harmonic sum up to n are MaxRL. Training curves show
the first settings only, one for each colour.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.objectives.report import panels, print_table, save
from benchmarks.reproductions.results import COLOURS, Rows, draw_at_kl, draw_curves
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study
from benchmarks.reproductions.tasks import make_once, run_module, warm_up_run
from services.recording.display import Display
from services.sweeps.statistics import Interval

WARM_UP = 350


def task(wanted: Options) -> Path:
    return wanted.folder / "maze"


def inputs(wanted: Options, display: Display) -> None:
    """Make the data and an untrained model, unless they exist."""
    make_once(task(wanted) / "data", "mazes", display, partial(run_module, "benchmarks.reproductions.mazes"))


def warm_up(wanted: Options) -> Planned:
    """The supervised run that all others start from."""
    return warm_up_run(task(wanted), WARM_UP, name="maze-warm-up", rows_per_step=64)


def draw(name: str, wanted: Options, rows: Rows, runs: Runs) -> None:
    """Print how far each method is from the best at every k; plot -log pass@k, and training pass@k."""
    print_gaps({method: found for method, found in rows.items() if method != "start"})
    figure, (by_k, steps, first, best) = panels(4)
    draw_logs(by_k, rows)
    draw_curves(steps, runs, "pass_at_1", "pass@1, % of training prompts")
    draw_at_kl(first, runs, "pass_at_1", "pass@1, % of training prompts")
    draw_at_kl(best, runs, "pass_at_64", "pass@64, % of training prompts")
    by_k.legend(frameon=False, fontsize=6)
    save(figure, wanted.out, name)


def print_gaps(rows: Rows) -> None:
    """Print each method's points behind the best method at each k, with 95% intervals over seeds, and the largest."""
    ks = [each.k for each in next(iter(rows.values()))]
    best = [max(rows.values(), key=lambda found, at=at: found[at].mean)[at] for at in range(len(ks))]  # type: ignore[misc]
    lines: list[list[object]] = []
    for method, found in rows.items():
        gaps = [
            Interval.of([100 * (theirs - ours) for theirs, ours in zip(top.seeds, own.seeds, strict=True)])
            for top, own in zip(best, found, strict=True)
        ]
        lines.append([method, *(_points(gap) for gap in gaps), f"{max(gap.mean for gap in gaps):.1f}"])
    print_table(["points behind the best", *(f"pass@{k}" for k in ks), "at most"], lines)


def _points(gap: Interval) -> str:
    return f"{gap.mean:.1f}" if gap.high is None else f"{gap.mean:.1f} ± {gap.high - gap.mean:.1f}"


def draw_logs(axis: Any, rows: Rows) -> None:
    """Plot -log pass@k against k, both on logarithmic axes, as far as a prompt was unsolved."""
    styles = [(colour, style) for style in ("-", ":") for colour in COLOURS]
    for (colour, style), (name, found) in zip(styles, rows.items(), strict=False):
        below = [each for each in found if each.mean < 1]
        logs = [-np.log(each.mean) for each in below]
        axis.plot([each.k for each in below], logs, style, color=colour, label=name, marker="o", markersize=2)
    axis.set(xlabel="k, tries", ylabel="-log pass@k of held-out prompts", yscale="log")
    axis.set_xscale("log", base=2)


STUDY = Study("maze", task, inputs, warm_up, draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
