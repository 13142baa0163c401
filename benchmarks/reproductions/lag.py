"""Training on old samples: lag 1, 4 and 8, with no correction, with token-level correction and with exact correction.

    python -m benchmarks.reproductions.lag [--seeds 1] [--steps 120] [--at-most 4]

All runs are on countdown, with the same number of samples, at twice the learning rate of `trade_off` so that the policy
moves noticeably within the lag. The objectives are the mean, whose advantages have both signs, and max@8 without
centring, whose advantages are never negative. ``exact`` weights a sample by its whole sequence, and with max@8 it also
weights the companions exactly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.objectives.report import panels, print_table, save
from benchmarks.reproductions.results import COLOURS, Rows, curve, draw_curves
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study
from services.store.folder import RunFolder

LAGS = (1, 4, 8)
CORRECTIONS = ("none", "token", "exact")


def named(objective: str, lag: int, correction: str) -> str:
    """The name of a method; with lag 0 there is nothing to correct."""
    return f"{objective}, lag {lag}" + (f", {correction}" if lag else "")


def draw(name: str, wanted: Options, rows: Rows, made: Runs) -> None:
    """Print ages and results; plot training pass@k against the lag, and training curves for the longest lag.

    The mean over all versions of a run, on prompts not seen before, says more than the last version's held-out figures:
    at this learning rate, consecutive versions differ a lot.
    """
    print_ages(made)
    figure, (first, best, curves) = panels(3)
    draw_by_lag(first, made, "mean", 1)
    draw_by_lag(best, made, "max@8", 8)
    longest = [named("mean", 0, "none"), *(named("mean", LAGS[-1], correction) for correction in CORRECTIONS)]
    shown = {method: made[method] for method in longest}
    draw_curves(curves, shown, "pass_at_1", "pass@1, % of training prompts", skip=0)
    for axis in (first, curves):
        axis.legend(frameon=False)
    save(figure, wanted.out, name)


def print_ages(made: Runs) -> None:
    """Print how many versions old the trained tokens were, training pass@k over the run, and final entropy and KL."""
    lines: list[list[object]] = []
    for method, of_method in made.items():
        counts = [row["lag_histogram"] for run in of_method for row in RunFolder(run.path).read("metrics")]
        tokens = sum(sum(each.values()) for each in counts)
        total_lag = sum(int(lag) * count for each in counts for lag, count in each.items())
        entropy, kl = (float(np.mean(curve(of_method, metric)[:, -1])) for metric in ("entropy", "kl_k1"))
        lines.append([method, total_lag / tokens, over_the_run(of_method, 1), over_the_run(of_method, 8), entropy, kl])
    columns = ("mean lag of a token", "training pass@1, %", "pass@8, %", "entropy at the end", "KL to the start")
    print_table(["", *columns], lines)


def over_the_run(runs: Sequence[Planned], k: int) -> float:
    """Training pass@k in percent, mean over all steps and seeds."""
    return 100 * float(curve(runs, f"pass_at_{k}", 1).mean())


def draw_by_lag(axis: Any, made: Runs, objective: str, k: int) -> None:
    """Plot training pass@k over the run against the lag, one line per correction."""
    for colour, correction in zip(COLOURS[1:], CORRECTIONS, strict=False):
        found = [over_the_run(made[named(objective, lag, correction)], k) for lag in (0, *LAGS)]
        axis.plot((0, *LAGS), found, color=colour, label=correction, marker="o", markersize=3)
    label = f"pass@{k}, % of training prompts"
    axis.set(title=f"trained for {objective}", xlabel="lag, versions", ylabel=label, xticks=(0, *LAGS))


STUDY = Study("lag", draw=draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
