"""A study from end to end: inputs, the missing runs, and once all are there table, figure and numbers."""

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
from services.display import Display
from services.foreground import run_in_foreground
from volley.errors import VolleyError

METRICS = ("pass_at_1", "pass_at_16")


def with_curves(name: str, wanted: Options, rows: Rows, runs: Runs) -> None:
    """Draw held-out pass@k, and two metrics of training against the steps."""
    figure, (by_k, *others) = panels(1 + len(METRICS))
    draw_pass_at_k(by_k, rows)
    for axis, metric in zip(others, METRICS, strict=True):
        draw_curves(axis, runs, metric, f"{metric.replace('_at_', '@')}, % of training prompts")
    by_k.legend(frameon=False)
    save(figure, wanted.out, name)


@dataclass(frozen=True, slots=True)
class Study:
    """Runs that are compared.

    Attributes:
        name: of the figure and its numbers.
        inputs: makes data and an untrained model where they are missing.
        warm_up: the run that all others start from.
        runs: by method, one a seed; the first method's first run evaluates the start, too.
        draw: draws the figure, and prints what is not in the table of held-out pass@k.
    """

    name: str
    inputs: Callable[[Options, Display], None]
    warm_up: Callable[[Options], Planned]
    runs: Callable[[Options], Runs]
    draw: Callable[[str, Options, Rows, Runs], None] = with_curves

    def conduct(self, description: str | None, *, seeds: int, steps: int) -> None:
        """The command; ``seeds`` and ``steps`` are defaults of its line."""
        wanted, display = options(description, seeds=seeds, steps=steps), Display()
        try:
            self.inputs(wanted, display)
            left = run_in_foreground(make_missing(self.plan(wanted), wanted, display))
        except VolleyError as error:
            sys.exit(f"{self.name}: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        if left:
            display.say(f"{left} runs left: the same command goes on")
            sys.exit(MORE_TO_DO)
        self.present(wanted)

    def plan(self, wanted: Options) -> list[Planned]:
        """Every run, in the order they are made."""
        return [self.warm_up(wanted), *seed_by_seed(self.runs(wanted))]

    def present(self, wanted: Options) -> None:
        """Table, figure and numbers of runs that are all there."""
        runs = self.runs(wanted)
        first = next(iter(runs.values()))
        rows = {"start": heldout(first[:1], at=0), **{name: heldout(of_name) for name, of_name in runs.items()}}
        wanted.out.mkdir(parents=True, exist_ok=True)
        print_pass_at_k(rows)
        self.draw(self.name, wanted, rows, runs)
        write_numbers(wanted.out / f"{self.name}.json", rows, runs, seeds=wanted.seeds, steps=wanted.steps)
