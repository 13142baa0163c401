"""The trade-off: the same model trained for one try or for 4, 8 or 16 tries, evaluated at every number of tries.

    python -m benchmarks.reproductions.trade_off [--seeds 3] [--steps 250] [--at-most 4]

The task is countdown on the full stack with n = 16 samples per prompt. Every objective and seed has the same start,
prompts, number of samples and steps. After arXiv 2503.19595, tables 1 and 2, and arXiv 2505.15201, figure 3. The curves
against the divergence from the start are measured on training prompts, each sampled once, before it is trained on.
"""

import numpy as np

from benchmarks.objectives.report import panels, print_table, save
from benchmarks.reproductions.results import (
    Rows,
    at_kl,
    curve,
    draw_at_kl,
    draw_pass_at_k,
    heldout,
)
from benchmarks.reproductions.runs import Options, Runs
from benchmarks.reproductions.study import Study

KL = np.array([0.1, 0.15, 0.2, 0.3])  # nats per token
LATE = 100  # steps


def draw(name: str, wanted: Options, rows: Rows, made: Runs) -> None:
    """Print further tables; plot held-out pass@k, and training pass@k against the divergence from the start."""
    print_gaps(made)
    print_at_kl(made)
    print_live(made)
    print_late(made)
    figure, (by_k, first, best) = panels(3)
    draw_pass_at_k(by_k, rows)
    draw_at_kl(first, made, "pass_at_1", "pass@1, % of training prompts")
    draw_at_kl(best, made, "pass_at_16", "pass@16, % of training prompts")
    by_k.legend(frameon=False)
    save(figure, wanted.out, name)


def print_gaps(made: Runs) -> None:
    """Print the difference between max@8 and the mean on held-out prompts, seed by seed."""
    pairs = [(heldout([best]), heldout([mean])) for best, mean in zip(made["max@8"], made["mean"], strict=True)]
    lines = []
    for index, first in enumerate(pairs[0][0]):
        gaps = [100 * (best[index].mean - mean[index].mean) for best, mean in pairs]
        lines.append([f"pass@{first.k}", ", ".join(f"{gap:+.1f}" for gap in gaps), f"{np.mean(gaps):+.1f}"])
    print_table(["max@8 less mean, points", "seed by seed", "mean"], lines)


def print_at_kl(made: Runs) -> None:
    """Print the training pass@k of each method when it first reaches each divergence from the start."""
    lines = []
    for method, of_method in made.items():
        values = {name: 100 * at_kl(of_method, name, KL).mean(axis=0) for name in ("pass_at_1", "pass_at_16")}
        cells = zip(*values.values(), strict=True)
        lines.append([method, *("-" if np.isnan(first) else f"{first:.1f} / {best:.1f}" for first, best in cells)])
    print_table(["training pass@1 / pass@16, % at", *(f"{kl} nats per token" for kl in KL)], lines)


def print_live(made: Runs) -> None:
    """Print the share of groups with a gradient; with k = n, only groups with a single correct sample have one."""
    lines = [[name, f"{curve(of_name, 'live_group_fraction').mean():.0%}"] for name, of_name in made.items()]
    print_table(["", "groups with a gradient"], lines)


def print_late(made: Runs) -> None:
    """Print training pass@k averaged over the last `LATE` steps, which depends less on luck than the last version."""
    lines = []
    for method, of_method in made.items():
        late = (curve(of_method, f"pass_at_{k}", 1)[:, -LATE:].mean(axis=-1) for k in (1, 4, 16))
        lines.append([method, *(", ".join(f"{100 * value:.1f}" for value in of_seed) for of_seed in late)])
    print_table([f"last {LATE} steps, seed by seed", *(f"training pass@{k}, %" for k in (1, 4, 16))], lines)


STUDY = Study("trade_off", draw=draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
