"""Clipping the gradient's norm or not, each at several learning rates: which setting learns best?

    python -m benchmarks.reproductions.clipping [--seeds 1] [--steps 200] [--at-most 4]

The task is countdown on the full stack, 32 prompts per step, n = 16, for the mean and for max@8. With `clip_norm: 1.0`
nearly every step is clipped, so AdamW sees gradients of one length, whatever signal their batch carries; without
clipping they keep their own. The table gives held-out pass@k, how many steps were clipped, and what the steps moved.
"""

from benchmarks.objectives.report import print_table
from benchmarks.reproductions.results import Rows, curve
from benchmarks.reproductions.runs import Options, Runs
from benchmarks.reproductions.study import Study, with_curves


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


STUDY = Study("clipping", draw=draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
