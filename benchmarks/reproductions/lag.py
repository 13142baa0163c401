"""Training on old samples: at lag 4 and 8, which correction keeps the curve of lag 0?

    python -m benchmarks.reproductions.lag [--seeds 3] [--steps 120] [--at-most 4]

All runs are on countdown, with the same number of samples, at a rate at which lag 0 works. The objectives are the mean,
whose advantages have both signs, and max@8 without centring, whose advantages are never negative. ``token`` weights
each token by its ratio and ``sequence`` the whole sample, ``masked`` drops samples whose weight is above 2 or below
1/2; with max@8, ``exact`` and ``masked`` also weight the companions exactly, and ``first order`` to the first order.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.objectives.report import panels, print_table, save
from benchmarks.reproductions.results import Rows, curve, draw_curves
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study
from services.store.folder import RunFolder
from services.sweeps.statistics import Interval

LAGS = (4, 8)
TRIES = {"mean": 1, "max@8": 8}
CORRECTIONS = ("none", "token", "sequence", "masked", "first order", "exact")  # the mean has the first four
LATE = 40  # steps


def draw(name: str, wanted: Options, rows: Rows, made: Runs) -> None:
    """Print ages and results; plot training pass@k of each correction, a panel per objective and lag.

    The mean over the last versions of a run, on prompts not seen before, says more than the last version's held-out
    figures: consecutive versions differ a lot.
    """
    print_results(made)
    figure, axes = panels(len(TRIES) * len(LAGS))
    places = [(objective, lag) for objective in TRIES for lag in LAGS]
    for axis, (objective, lag) in zip(axes, places, strict=True):
        draw_lag(axis, made, objective, lag)
    axes[-1].legend(frameon=False)
    axes[0].legend(frameon=False)
    save(figure, wanted.out, name)


def print_results(made: Runs) -> None:
    """Print the age of trained tokens in versions, late training pass@k, its gap to lag 0, and the divergence."""
    lines: list[list[object]] = []
    for method, of_method in made.items():
        objective = method.split(",")[0]
        k = TRIES[objective]
        gap = Interval.of(late_pass_at(of_method, k) - late_pass_at(made[f"{objective}, lag 0"], k))
        late = [", ".join(f"{value:.1f}" for value in late_pass_at(of_method, each)) for each in TRIES.values()]
        half = "" if gap.high is None else f" ± {gap.high - gap.mean:.1f}"
        divergence = float(curve(of_method, "kl_k1", LATE)[:, -1].mean())
        lines.append([method, age(of_method), *late, f"{gap.mean:+.1f}{half}", divergence])
    columns = ("mean lag", *(f"pass@{k}, %" for k in TRIES.values()), "less lag 0 at its own k", "nats per token")
    print_table([f"training, last {LATE} steps", *columns], lines)


def age(runs: Sequence[Planned]) -> float:
    """How many versions old a trained token was on average."""
    counts = [row["lag_histogram"] for run in runs for row in RunFolder(run.path).read("metrics")]
    tokens = sum(sum(each.values()) for each in counts)
    return float(sum(int(lag) * count for each in counts for lag, count in each.items()) / tokens)


def late_pass_at(runs: Sequence[Planned], k: int) -> Any:
    """Training pass@k in percent, mean over the last steps of each seed, [S]."""
    return 100 * curve(runs, f"pass_at_{k}", 1)[:, -LATE:].mean(axis=-1)


def draw_lag(axis: Any, made: Runs, objective: str, lag: int) -> None:
    """Plot training pass@k against steps: lag 0, and every correction at one lag."""
    k = TRIES[objective]
    corrections = {each: f"{objective}, lag {lag}, {each}" for each in CORRECTIONS}
    shown = {"lag 0": made[f"{objective}, lag 0"]}
    shown |= {each: made[name] for each, name in corrections.items() if name in made}
    draw_curves(axis, shown, f"pass_at_{k}", f"pass@{k}, % of training prompts", skip=0)
    axis.set(title=f"trained for {objective}, lag {lag}")


STUDY = Study("lag", draw=draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
