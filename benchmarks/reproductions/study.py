"""A study from end to end: makes inputs and missing runs and, when all runs are done, table, figure and numbers."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.objectives.report import panels, save
from benchmarks.reproductions.results import (
    Rows,
    draw_curves,
    draw_pass_at_k,
    heldout,
    print_pass_at_k,
    write_numbers,
)
from benchmarks.reproductions.runs import (
    MORE_TO_DO,
    Options,
    Planned,
    Runs,
    make_missing,
    options,
    seed_by_seed,
)
from services.recording.display import Display
from services.signals import run_in_foreground
from volley.errors import VolleyError

METRICS = ("pass_at_1", "pass_at_16")


def with_curves(name: str, wanted: Options, rows: Rows, runs: Runs) -> None:
    """Plot held-out pass@k, and two training metrics against steps."""
    figure, (by_k, *others) = panels(1 + len(METRICS))
    draw_pass_at_k(by_k, rows)
    for axis, metric in zip(others, METRICS, strict=True):
        draw_curves(axis, runs, metric, f"{metric.replace('_at_', '@')}, % of training prompts")
    by_k.legend(frameon=False)
    save(figure, wanted.out, name)


@dataclass(frozen=True, slots=True)
class Study:
    """A set of runs that are compared with each other.

    Attributes:
        name: name of the figure and of the file with its numbers.
        inputs: makes the data and an untrained model if they are missing.
        warm_up: the run that all others start from.
        runs: by method, one run per seed; the first method's first run also evaluates the start.
        draw: draws the figure and prints tables beyond that of held-out pass@k.
    """

    name: str
    inputs: Callable[[Options, Display], None]
    warm_up: Callable[[Options], Planned]
    runs: Callable[[Options], Runs]
    draw: Callable[[str, Options, Rows, Runs], None] = with_curves

    def conduct(self, description: str | None, *, seeds: int, steps: int) -> None:
        """Run the study's command; ``seeds`` and ``steps`` are the defaults of its options."""
        wanted, display = options(description, seeds=seeds, steps=steps), Display()
        try:
            self.inputs(wanted, display)
            left = run_in_foreground(make_missing(self.plan(wanted), wanted, display))
        except VolleyError as error:
            sys.exit(f"{self.name}: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        if left:
            display.say(f"{left} runs left: repeat the command to continue")
            sys.exit(MORE_TO_DO)
        self.present(wanted)

    def plan(self, wanted: Options) -> list[Planned]:
        """All runs, in the order in which they are made."""
        return [self.warm_up(wanted), *seed_by_seed(self.runs(wanted))]

    def present(self, wanted: Options) -> None:
        """Print the table and write the figure and its numbers; all runs must be done."""
        runs = self.runs(wanted)
        first = next(iter(runs.values()))
        rows = {"start": heldout(first[:1], at=0), **{name: heldout(of_name) for name, of_name in runs.items()}}
        wanted.out.mkdir(parents=True, exist_ok=True)
        print_pass_at_k(rows)
        self.draw(self.name, wanted, rows, runs)
        write_numbers(wanted.out / f"{self.name}.json", rows, runs, seeds=wanted.seeds, steps=wanted.steps)
