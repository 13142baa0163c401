"""The main example from end to end: ``make demo``.

    make data and an untrained model -> supervised warm-up -> RL for the mean, RL for max@8 -> held-out pass@k, plots

One local stack (Ray head and embedded Redis) serves all three runs. Results are written to ``demo/``, or to
``demo/quick/`` with ``--quick``.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from examples.countdown import make_data
from services.jobs.job_file import Job, load_job
from services.jobs.needs import check_host, needs_of
from services.recording import plots
from services.recording.display import Display
from services.runs.run import prepare, run_on
from services.signals import run_in_foreground
from services.stack.ephemeral import Stack, local_stack
from services.store.folder import RunFolder
from services.sweeps.statistics import axis_of, metrics_of
from volley.errors import VolleyError

HERE = Path(__file__).parent
SMOOTHED = 20  # steps in the moving mean of what is compared at equal divergence
COLOURS = {"start": "#8c959f", "mean": "#d1495b", "max@8": "#1f77b4"}
FULL: dict[str, dict[str, Any]] = {"warm-up": {}, "mean": {}, "max-at-8": {}}
# A larger rate than the job files', so that so few steps show something.
FEW: dict[str, Any] = {"steps": 40, "evaluation.sampling.n": 64, "optimizer.lr": 1e-4}
QUICK: dict[str, dict[str, Any]] = {"warm-up": {"steps": 250}, "mean": FEW, "max-at-8": FEW}


def make_inputs(folder: Path, display: Display, *, heldout: int) -> None:
    """Make the data and an untrained model in ``folder/data``, unless they exist."""
    data = folder / "data"
    if (data / "done").exists():
        return
    display.say("making data and an untrained model")
    make_data.make(data, supervised=76_800, train=9_600, heldout=heldout)
    make_model = [sys.executable, "-m", "examples.countdown.make_model", str(data / "untrained")]
    subprocess.run(make_model, check=True, capture_output=True)  # a separate process keeps torch out of this one
    (data / "done").touch()


def job_of(folder: Path, name: str, changes: Mapping[str, Any]) -> Job:
    """The job of this example named ``name``, with data and model in ``folder`` and with ``changes``."""
    data = folder / "data"
    file = {"warm-up": "sft.yaml", "mean": "mean.yaml", "max-at-8": "max8.yaml"}[name]
    places: dict[str, Any] = {"data.path": str(data / "train.jsonl"), "model.path": str(folder / "warm-up" / "model")}
    if name == "warm-up":
        places = {"data.path": str(data / "sft.jsonl"), "model.path": str(data / "untrained")}
    else:
        places["evaluation.data.path"] = str(data / "heldout.jsonl")
    if name == "max-at-8":
        places["evaluation.at_start"] = False  # the run for the mean evaluates the same start
    return load_job(HERE / file, {**places, **changes})


async def run_all(folder: Path, jobs: Mapping[str, Mapping[str, Any]], display: Display) -> dict[str, RunFolder]:
    """Run the three jobs one after the other on one stack."""
    needs = needs_of(job_of(folder, "mean", jobs["mean"]))
    check_host(needs, folder)
    display.say("starting a local Ray head and an embedded Redis")
    runs: dict[str, RunFolder] = {}
    async with local_stack(needs, folder / "stack") as stack:
        for name, changes in jobs.items():
            runs[name] = await run_one(stack, folder, name, job_of(folder, name, changes), display)
    return runs


async def run_one(stack: Stack, folder: Path, name: str, job: Job, display: Display) -> RunFolder:
    """Run one job in ``folder/<name>``; an earlier run there is deleted."""
    shutil.rmtree(folder / name, ignore_errors=True)
    run = RunFolder.at(folder / name, job)
    result = await run_on(stack, prepare(job), run, display)
    display.say(f"{name}: {result.seconds:.0f} s")
    return run


def evaluations(runs: Mapping[str, RunFolder]) -> dict[str, dict[str, Any]]:
    """The held-out evaluations of the start, the mean and max@8."""
    mean, best = runs["mean"].read("evaluations"), runs["max-at-8"].read("evaluations")
    return {"start": mean[0], "mean": mean[-1], "max@8": best[-1]}


def results_table(rows: Mapping[str, Mapping[str, Any]], models: str = "trained for") -> Table:
    """A table of pass@k in percent with 95% intervals; one line per model, the best in bold.

    Args:
        models: heading of the models' names.
    """
    first = next(iter(rows.values()))
    table = Table(title=f"pass@k, % of {first['prompts']} held-out prompts, {first['n']} samples each, 95% intervals")
    table.add_column(models)
    best = {}
    for index, estimate in enumerate(first["estimates"]):
        table.add_column(f"pass@{estimate['k']}", justify="right")
        best[index] = max(row["estimates"][index]["mean"] for row in rows.values())
    for name, row in rows.items():
        cells = []
        for index, e in enumerate(row["estimates"]):
            cell = f"{100 * e['mean']:.1f}\n[dim]{100 * e['low']:.0f}-{100 * e['high']:.0f}[/dim]"
            cells.append(f"[bold]{cell}[/bold]" if e["mean"] == best[index] else cell)
        table.add_row(name, *cells)
    return table


def divergence_table(trained: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """pass@k of the training prompts where the runs are as far from the start, in percent; one line per run.

    No prompt comes twice, so a step's pass@k is that of prompts the model has not been trained on.

    Args:
        trained: the rows of each run's metrics.
    """
    metrics = {name: metrics_of(rows) for name, rows in trained.items()}
    reached = {name: axis_of(each, "divergence", n=0) for name, each in metrics.items()}
    shared = min(float(divergence[-1]) for divergence in reached.values())
    table = Table(title=f"pass@k, % of training prompts, at {shared:.2f} nats per token")
    table.add_column("trained for")
    ks = [k for k in (1, 2, 4, 8, 16) if all(f"pass_at_{k}" in each.columns for each in metrics.values())]
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    for name, each in metrics.items():
        at = int(np.argmax(reached[name] >= shared))
        near = slice(max(0, at - SMOOTHED // 2), at + SMOOTHED // 2)
        table.add_row(name, *(f"{100 * each[f'pass_at_{k}'][near].mean():.1f}" for k in ks))
    return table


def present(folder: Path, runs: Mapping[str, RunFolder], display: Display, seconds: float) -> None:
    """Print the table, draw the plots, and print where everything is."""
    rows = evaluations(runs)
    (folder / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    trained = {"mean": runs["mean"], "max@8": runs["max-at-8"]}
    curves = plots.compare_runs(trained, folder / "learning_curves.png", COLOURS)
    picture = plots.pass_at_k(
        rows,
        folder / "pass_at_k.png",
        title="Countdown, held-out prompts: the same model, samples and steps,\ntrained for one try and for eight",
        colours=COLOURS,
    )
    display.console.print()
    display.console.print(results_table(rows))
    display.console.print(divergence_table({name: run.read("metrics") for name, run in trained.items()}))
    display.console.print()
    for what, path in (
        ("pass@k", picture),
        ("learning curves", curves),
        *((f"model, {name}", run.model) for name, run in runs.items()),
    ):
        display.console.print(f"{what:18}{path}", soft_wrap=True)
    display.console.print(f"\nwall time {seconds // 60:.0f} min {seconds % 60:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a smaller version of everything")
    parser.add_argument(
        "--folder", type=Path, help="folder for the results; default: demo/, or demo/quick/ with --quick"
    )
    args = parser.parse_args()
    folder = (args.folder or Path("demo/quick" if args.quick else "demo")).resolve()
    display, begun = Display(), time.monotonic()
    try:
        make_inputs(folder, display, heldout=50 if args.quick else 200)
        runs = run_in_foreground(run_all(folder, QUICK if args.quick else FULL, display))
        present(folder, runs, display, time.monotonic() - begun)
    except VolleyError as error:
        sys.exit(f"demo: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


if __name__ == "__main__":
    main()
