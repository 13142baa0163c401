"""Answers that can be voted on: training for the majority of eight answers, compared with the mean and max@8.

    python -m benchmarks.reproductions.majority [--seeds 1] [--steps 150] [--at-most 4]

The task is sums and differences of five numbers, judged by ``exact``. The small model of `countdown`, after a short
warm-up, spreads its answers around the right one. After arXiv 2503.19595, section 3.2.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.objectives.report import panels, print_table, save
from benchmarks.reproductions.countdown import untrained
from benchmarks.reproductions.results import Rows, draw_curves, draw_pass_at_k, heldout
from benchmarks.reproductions.runs import Options, Planned, Runs
from benchmarks.reproductions.study import Study
from benchmarks.reproductions.tasks import make_once, warm_up_run
from services.recording.display import Display

NUMBERS, WARM_UP = 5, 300
SIZES = {"heldout": 200, "sft": 38_400, "train": 9_600}


def task(wanted: Options) -> Path:
    return wanted.folder / "majority"


def lines(rng: random.Random, total: int, taken: set[str]) -> Iterator[str]:
    """Rows as JSON, with prompts that are not in ``taken``; adds them to it."""
    while total:
        first, *others = (rng.randint(1, 9) for _ in range(NUMBERS))
        signed = [rng.choice((-1, 1)) * number for number in others]
        expression = "".join((str(first), *(f"{number:+d}" for number in signed)))
        if expression not in taken:
            taken.add(expression)
            total -= 1
            yield json.dumps({"prompt": f"{expression}=", "answer": str(first + sum(signed))}) + "\n"


def inputs(wanted: Options, display: Display) -> None:
    """Make the data and an untrained model, unless they exist."""

    def make(data: Path) -> None:
        taken: set[str] = set()
        for name, total in SIZES.items():
            (data / f"{name}.jsonl").write_text("".join(lines(random.Random(name), total, taken)))
        untrained(data / "untrained")

    make_once(task(wanted) / "data", "sums", display, make)


def warm_up(wanted: Options) -> Planned:
    """The supervised run that all others start from; too short for the model to be always right."""
    return warm_up_run(task(wanted), WARM_UP, name="majority-warm-up")


def draw(name: str, wanted: Options, rows: Rows, made: Runs) -> None:
    """Plot held-out maj@k and pass@k, and training pass@1."""
    voted = {
        "start": heldout(made["mean"][:1], at=0, of="majority"),
        **{method: heldout(of_method, of="majority") for method, of_method in made.items()},
    }
    table = [[method, *(f"{100 * each.mean:.1f}" for each in found)] for method, found in voted.items()]
    print_table(["held-out prompts, %", *(f"maj@{each.k}" for each in voted["start"])], table)
    figure, (majority, best, first) = panels(3)
    draw_pass_at_k(majority, voted)
    majority.set(ylabel="maj@k, % of held-out prompts")
    draw_pass_at_k(best, rows)
    draw_curves(first, made, "pass_at_1", "pass@1, % of training prompts")
    majority.legend(frameon=False)
    save(figure, wanted.out, name)


STUDY = Study("majority", task, inputs, warm_up, draw)

if __name__ == "__main__":
    STUDY.conduct(__doc__)
