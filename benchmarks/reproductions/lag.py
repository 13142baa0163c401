"""Training on old samples: lag 1, 4 and 8 with no correction, with the token correction, and with the exact one.

    python -m benchmarks.reproductions.lag [--seeds 1] [--steps 120] [--at-most 4]

max@8 on countdown, the same number of samples for all, at twice the learning rate of the other studies so that the
policy moves within the lag. ``exact`` weighs a sample by its own sequence weight and its companions exactly.
"""

from typing import Any

import numpy as np

from benchmarks.objectives.report import panels, print_table, save
from benchmarks.reproductions import countdown
from benchmarks.reproductions.countdown import inputs, trained, warm_up
from benchmarks.reproductions.results import COLOURS, Rows, curve, draw_curves
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study
from services.run_folder import RunFolder

LAGS, RATE = (1, 4, 8), 2 * countdown.RATE
CORRECTIONS: dict[str, tuple[str, str]] = {  # of a sample's own weight, and of its companions'
    "none": ("none", "none"),
    "token": ("token", "none"),
    "exact": ("sequence", "exact"),
}


def one(wanted: Options, lag: int, correction: str, seed: int) -> Planned:
    own, companions = CORRECTIONS[correction]
    changes: dict[str, Any] = {
        "max_lag": lag,
        "objective": {"kind": "max_at_k", "k": 8, "companion_weights": companions},
        "update__behaviour_correction": {"kind": own},
        "optimizer": {"lr": RATE, "warmup_steps": countdown.RISING},
        "first": (lag, seed) == (0, 1),
    }
    return trained(wanted, f"lag-{lag}-{correction}", seed, **changes)


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """By lag and correction, one run a seed."""
    seeds = range(1, wanted.seeds + 1)
    named = {"lag 0": (0, "none")} | {f"lag {lag}, {name}": (lag, name) for lag in LAGS for name in CORRECTIONS}
    return {name: [one(wanted, *setting, seed) for seed in seeds] for name, setting in named.items()}


def draw(name: str, wanted: Options, rows: Rows, made: Runs) -> None:
    """How old the samples were and how far they led; held-out pass@k against the lag, and curves of the longest."""
    print_ages(made)
    figure, (first, best, curves) = panels(3)
    for axis, k in ((first, 1), (best, 8)):
        draw_by_lag(axis, rows, k)
    longest = {method: runs for method, runs in made.items() if method.startswith(("lag 0", f"lag {LAGS[-1]},"))}
    draw_curves(curves, longest, "pass_at_16", "pass@16, % of training prompts", skip=0)
    best.legend(frameon=False)
    curves.legend(frameon=False)
    save(figure, wanted.out, name)


def print_ages(made: Runs) -> None:
    """By how many versions a token was old when it was trained on, and where training ended."""
    lines: list[list[object]] = []
    for method, of_method in made.items():
        counts = [row["lag_histogram"] for run in of_method for row in RunFolder(run.path).read("metrics")]
        tokens = sum(sum(each.values()) for each in counts)
        old = sum(int(lag) * count for each in counts for lag, count in each.items())
        entropy, kl = (float(np.mean(curve(of_method, metric)[:, -1])) for metric in ("entropy", "kl_k1"))
        lines.append([method, old / tokens, entropy, kl])
    print_table(["", "mean lag of a token", "entropy at the end", "KL to the start, nats a token"], lines)


def draw_by_lag(axis: Any, rows: Rows, k: int) -> None:
    """Held-out pass@k at the end, a line for each correction; bars are 95% intervals over prompts."""
    for colour, correction in zip(COLOURS[1:], CORRECTIONS, strict=False):
        methods = ["lag 0", *(f"lag {lag}, {correction}" for lag in LAGS)]
        found = [next(each for each in rows[method] if each.k == k) for method in methods]
        means, lows, highs = 100 * np.array([(each.mean, each.low, each.high) for each in found]).T
        axis.errorbar((0, *LAGS), means, (means - lows, highs - means), color=colour, label=correction, capsize=2)
    axis.set(xlabel="lag, versions", ylabel=f"pass@{k}, % of held-out prompts", xticks=(0, *LAGS))


STUDY = Study("lag", inputs, warm_up, runs, draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=120)
