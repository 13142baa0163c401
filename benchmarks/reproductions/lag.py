"""Training on old samples: lag 0, 4 and 8 with no correction, with the token correction, and with the exact one.

    python -m benchmarks.reproductions.lag [--seeds 1] [--steps 120] [--at-most 4]

max@8 on countdown, the same number of samples for all, at twice the learning rate of the other studies so that the
policy moves within the lag. ``exact`` weighs a sample by its own sequence weight and its companions exactly.
"""

from typing import Any

import numpy as np

from benchmarks.objectives.report import print_table
from benchmarks.reproductions import countdown
from benchmarks.reproductions.countdown import inputs, trained, warm_up
from benchmarks.reproductions.results import Rows, curve
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study, with_curves
from services.run_folder import RunFolder

LAGS, RATE = (4, 8), 2 * countdown.RATE
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
    """The usual figure, and how old the samples were and how far they led."""
    lines: list[list[object]] = []
    for method, of_method in made.items():
        counts = [row["lag_histogram"] for run in of_method for row in RunFolder(run.path).read("metrics")]
        tokens = sum(sum(each.values()) for each in counts)
        old = sum(int(lag) * count for each in counts for lag, count in each.items())
        entropy, kl = (float(np.mean(curve(of_method, metric)[:, -1])) for metric in ("entropy", "kl_k1"))
        lines.append([method, old / tokens, entropy, kl])
    print_table(["", "mean lag of a token", "entropy at the end", "KL to the start, nats a token"], lines)
    with_curves(name, wanted, rows, made)


STUDY = Study("lag", inputs, warm_up, runs, draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=120)
