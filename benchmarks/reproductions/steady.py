"""The trade-off at a smaller learning rate with more prompts per step: how much of it is left?

    python -m benchmarks.reproductions.steady [--seeds 1] [--steps 250] [--at-most 4]

This is `trade_off` with 32 prompts per step instead of 16, so twice the samples, and two fifths of its learning rate.
"""

from typing import Any

from benchmarks.reproductions import trade_off
from benchmarks.reproductions.countdown import OBJECTIVES, inputs, trained, warm_up
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from benchmarks.reproductions.tasks import RISING

PROMPTS, RATE = 32, 6e-5


def planned(wanted: Options, name: str, seed: int, **changes: Any) -> Planned:
    """A run named ``name``, with the objective of that name if there is one, and ``changes`` to the job."""
    settings = {
        "prompts_per_step": PROMPTS,
        "optimizer": {"lr": RATE, "warmup_steps": RISING, "clip_norm": 1.0},
        **changes,
    }
    if name in OBJECTIVES:
        settings |= {"objective": OBJECTIVES[name], "first": (name, seed) == ("mean", 1)}
    return trained(wanted, f"steady-{name}", seed, **settings)


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """Each objective's runs, one per seed; the first run also evaluates the start."""
    return {name: [planned(wanted, name, seed) for seed in range(1, wanted.seeds + 1)] for name in OBJECTIVES}


STUDY = Study("steady", inputs, warm_up, runs, trade_off.draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=250)
