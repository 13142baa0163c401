"""Prompts worth their samples: refill and selection by solve rate, alone and together, against every prompt in turn.

    python -m benchmarks.reproductions.worth [--seeds 1] [--steps 100] [--at-most 2]

The objective is max@16 with n = 16: only groups with a single right sample have a gradient. 400 training prompts, so
that each is met again and its solve rate is known. Refill makes more samples per step, at most twice as many.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.objectives.report import print_table
from benchmarks.reproductions import adaptive
from benchmarks.reproductions.results import Rows
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study, with_curves
from services.store.folder import RunFolder

PROMPTS_PER_STEP = 16


def draw(name: str, wanted: Options, rows: Rows, made: Runs) -> None:
    """Print the shares of groups and samples with a gradient; plot pass@k and training curves."""
    first_pass = adaptive.PROMPTS // PROMPTS_PER_STEP  # steps; no solve rate is known before
    print_table(
        [
            "steps after the first pass",
            "groups made",
            "live of made",
            "live of trained",
            "samples of made",
            "of trained",
        ],
        [[method, *shares(of_method, first_pass)] for method, of_method in made.items()],
    )
    with_curves(name, wanted, rows, made)


def shares(runs: Sequence[Planned], since: int) -> list[str]:
    """Groups made per step, and the shares of groups and samples with a gradient, from step ``since`` on."""
    steps = [row for run in runs for row in RunFolder(run.path).read("metrics")[since:]]
    return shown(steps)


def shown(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """The cells of `shares` for the rows of ``steps``."""
    trained = np.full(len(steps), float(PROMPTS_PER_STEP))
    made = trained + [step.get("replaced_groups", 0) for step in steps]
    live = trained * [step["live_group_fraction"] for step in steps]
    samples = np.array([step["live_sample_fraction"] for step in steps])
    counts = (live.sum() / made.sum(), live.sum() / trained.sum(), (samples * trained).sum() / made.sum())
    return [f"{made.mean():.1f}", *(f"{share:.1%}" for share in (*counts, samples.mean()))]


STUDY = Study("worth", inputs=adaptive.inputs, draw=draw, prompts=adaptive.SUBSET)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
