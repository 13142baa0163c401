"""Training on old samples: lag 0, 4 and 8 with no correction, with the token correction, and with the exact one.

    python -m benchmarks.reproductions.lag [--seeds 1] [--steps 150] [--at-most 4]

max@8 on countdown, the same number of samples for all, at three times the learning rate of the other studies so that
the policy moves within the lag. ``exact`` weighs a sample by its own sequence weight and its companions exactly.
"""

from typing import Any

from benchmarks.reproductions.countdown import inputs, trained, warm_up
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study

LAGS, RATE = (4, 8), 4.5e-4
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
        "optimizer__lr": RATE,
        "first": (lag, seed) == (0, 1),
    }
    return trained(wanted, f"lag-{lag}-{correction}", seed, **changes)


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """By lag and correction, one run a seed."""
    seeds = range(1, wanted.seeds + 1)
    named = {"lag 0": (0, "none")} | {f"lag {lag}, {name}": (lag, name) for lag in LAGS for name in CORRECTIONS}
    return {name: [one(wanted, *setting, seed) for seed in seeds] for name, setting in named.items()}


STUDY = Study("lag", inputs, warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=150)
