"""A study from end to end: its inputs, the sweep of its file and, when all runs are done, table, figure and numbers.

Beside each study's module is its sweep file. The module adds what a sweep cannot say: data and a model made on the
spot, and tables and figures of its own.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.objectives.report import panels, save
from benchmarks.reproductions.countdown import inputs, task, warm_up
from benchmarks.reproductions.results import (
    Rows,
    draw_curves,
    draw_pass_at_k,
    heldout,
    print_pass_at_k,
    write_numbers,
)
from benchmarks.reproductions.runs import MORE_TO_DO, Options, Planned, Runs, make_missing, options
from services.recording.display import Display
from services.signals import run_in_foreground
from services.sweeps.conduct import SweepStop, conduct
from services.sweeps.local import LocalRunner
from services.sweeps.spec import Sweep, load_sweep
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
    """A sweep with its inputs. The first run also evaluates the start.

    Attributes:
        name: of the sweep file, the figure and the file with its numbers.
        task: the folder of data, warmed-up model and runs.
        inputs: makes the data and an untrained model if they are missing.
        warm_up: the run that all others start from.
        draw: draws the figure and prints tables beyond that of held-out pass@k.
        prompts: file of the training prompts.
    """

    name: str
    task: Callable[[Options], Path] = task
    inputs: Callable[[Options, Display], None] = inputs
    warm_up: Callable[[Options], Planned] = warm_up
    draw: Callable[[str, Options, Rows, Runs], None] = with_curves
    prompts: str = "train.jsonl"

    def conduct(self, description: str | None) -> None:
        """Run the study's command."""
        wanted, display, stop = options(description), Display(), SweepStop()
        try:
            self.inputs(wanted, display)
            left = run_in_foreground(self.make_missing(wanted, display, stop), stop)
        except VolleyError as error:
            sys.exit(f"{self.name}: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        if left:
            display.say(f"{left} runs left: repeat the command to continue")
            sys.exit(MORE_TO_DO)
        self.present(wanted)

    def sweep(self, wanted: Options) -> Sweep:
        """The sweep file, with the task's own paths."""
        folder = self.task(wanted)
        changes: dict[str, object] = {
            "model.path": str(folder / "warm-up" / "model"),
            "data.path": str(folder / "data" / self.prompts),
            "evaluation.data.path": str(folder / "data" / "heldout.jsonl"),
        }
        if wanted.steps is not None:
            changes["steps"] = wanted.steps
        seeds = None if wanted.seeds is None else tuple(range(1, wanted.seeds + 1))
        return load_sweep(Path(__file__).with_name(f"{self.name}.yaml"), changes, seeds)

    def runs(self, wanted: Options) -> Runs:
        """The runs of each setting, one per seed."""
        sweep = self.sweep(wanted)
        folder = self.task(wanted) / sweep.name
        return {
            name: [Planned(folder / each.name, each.job) for each in members] for name, members in sweep.groups.items()
        }

    async def make_missing(self, wanted: Options, display: Display, stop: SweepStop) -> int:
        """Make at most ``wanted.at_most`` of the runs that are missing, or failed; returns how many are left."""
        warm_up, sweep = self.warm_up(wanted), self.sweep(wanted)
        most = wanted.at_most
        if not warm_up.done:
            if await make_missing([warm_up], wanted, display):
                return 1 + len(sweep.members)
            most = most and most - 1
        runner = LocalRunner(self.task(wanted) / sweep.name, Path(__file__).parent, keep_checkpoints=False)
        found = await conduct(sweep, runner, display, stop, retry=True, at_most=most)
        return sum(each.name not in found or found[each.name].state != "done" for each in sweep.members)

    def present(self, wanted: Options) -> None:
        """Print the table and write the figure and its numbers; all runs must be done."""
        sweep, runs = self.sweep(wanted), self.runs(wanted)
        first = next(iter(runs.values()))
        rows = {"start": heldout(first[:1], at=0), **{name: heldout(of_name) for name, of_name in runs.items()}}
        wanted.out.mkdir(parents=True, exist_ok=True)
        print_pass_at_k(rows)
        self.draw(self.name, wanted, rows, runs)
        steps = getattr(first[0].job, "steps", None)
        write_numbers(wanted.out / f"{self.name}.json", rows, runs, seeds=len(sweep.spec.seeds), steps=steps)
