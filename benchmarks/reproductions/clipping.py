"""Clipping the gradient's norm or not, each at several learning rates: which setting learns best?

    python -m benchmarks.reproductions.clipping [--seeds 1] [--steps 200] [--at-most 4]

The task is countdown on the full stack, 32 prompts per step, n = 16, for the mean and for max@8. With `clip_norm: 1.0`
nearly every step is clipped, so AdamW sees gradients of one length, whatever signal their batch carries; without
clipping they keep their own. The table gives held-out pass@k, how many steps were clipped, and what the steps moved.
"""

from itertools import product

from benchmarks.objectives.report import print_table
from benchmarks.reproductions.countdown import OBJECTIVES, inputs, trained, warm_up
from benchmarks.reproductions.results import Rows, curve
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study, with_curves
from benchmarks.reproductions.tasks import RISING

PROMPTS = 32
RATES = (6e-5, 1.5e-4)
CLIPS = {"unclipped": None, "clip 1.0": 1.0}


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """Each objective at each rate, clipped and not; the first run also evaluates the start."""
    seeds = range(1, wanted.seeds + 1)
    made: dict[str, list[Planned]] = {}
    for rate, (clip, norm), objective in product(RATES, CLIPS.items(), ("mean", "max@8")):
        made[f"{objective}, {clip}, {rate:g}"] = [
            trained(
                wanted,
                f"clipping-{objective}-{clip.replace(' ', '-')}-{rate:g}",
                seed,
                first=not made and seed == 1,
                objective=OBJECTIVES[objective],
                prompts_per_step=PROMPTS,
                optimizer={"lr": rate, "warmup_steps": RISING, "clip_norm": norm},
            )
            for seed in seeds
        ]
    return made


def draw(name: str, wanted: Options, rows: Rows, made: Runs) -> None:
    """Plot pass@k and curves; print how long the gradients were, how many were cut, and how far the policy went."""
    lines = []
    for method, of_method in made.items():
        norms, cut, divergence = (curve(of_method, each, 1) for each in ("grad_norm", "clipped_share", "kl_k1"))
        lines.append(
            [
                method,
                float(norms.mean()),
                float(norms.std() / norms.mean()),
                f"{cut.mean():.0%}",
                float(divergence[:, -20:].mean()),
            ]
        )
    print_table(["", "gradient norm, mean", "its spread / mean", "steps clipped", "divergence, last 20"], lines)
    with_curves(name, wanted, rows, made)


STUDY = Study("clipping", inputs, warm_up, runs, draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=200)
