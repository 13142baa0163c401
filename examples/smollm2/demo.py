"""A pretrained model on tasks that others wrote: ``make demo-llm``.

    fetch SmolLM2-135M-Instruct -> RL for the mean, max@8 and MaxRL -> held-out pass@k, samples, plots

The model comes from a Python package in 4 bits and is dequantised, so its figures are not those of the published one.
Results are written to ``demo-llm/``, or to ``demo-llm/quick/`` with ``--quick``. The same command continues a demo that
was interrupted: runs that are done are kept, and the others resume from their newest checkpoint.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.countdown.demo import results_table
from services.jobs.job_file import Job, load_job
from services.jobs.needs import check_host, needs_of
from services.models.packaged import fetch
from services.recording import plots
from services.recording.display import Display
from services.runs.checkpoints import newest_checkpoint_or_none, steps_of
from services.runs.run import prepare, run_on
from services.signals import run_in_foreground
from services.stack.ephemeral import Stack, local_stack
from services.store.folder import RunFolder
from volley.errors import VolleyError

MODEL = "smollm2-135m-instruct"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "mean": {"kind": "mean"},
    "max@8": {"kind": "max_at_k", "k": 8, "center": True},
    "MaxRL": {"kind": "maxrl"},  # the sum of max@k / k for k up to n, centred and scaled
}
# Adapters in place of the whole model, so that it fits into the memory of a small machine beside other work.
QUICK: dict[str, Any] = {
    "steps": 2,
    "model.lora": {"rank": 8},
    "optimizer.lr": 1e-4,
    "evaluation.data.size": 8,
    "checkpoint.every": 1,
}
SHOWN = 3  # samples printed per run


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.replace("@", "-at-")


def job_of(folder: Path, model: Path, name: str, changes: Mapping[str, Any]) -> Job:
    """The job that trains ``model`` for the objective ``name``."""
    own: dict[str, Any] = {
        "name": folder_of(folder, name).name,
        "model.path": str(model),
        "objective": OBJECTIVES[name],
    }
    own["evaluation.at_start"] = name == "mean"  # all start alike
    return load_job(Path(__file__).with_name("job.yaml"), {**own, **changes})


async def run_all(folder: Path, model: Path, changes: Mapping[str, Any], display: Display) -> dict[str, RunFolder]:
    """Run the three jobs one after the other on one stack."""
    jobs = {name: job_of(folder, model, name, changes) for name in OBJECTIVES}
    needs = needs_of(jobs["mean"])
    check_host(needs, folder)
    async with local_stack(needs, folder / "stack") as stack:
        return {name: await run_one(stack, folder_of(folder, name), job, display) for name, job in jobs.items()}


async def run_one(stack: Stack, place: Path, job: Job, display: Display) -> RunFolder:
    """Run one job in ``place``, or what an interrupted demo has left of it."""
    checkpoint = None
    if (place / "summary.json").exists():
        run, earlier = RunFolder.open(place)
        if earlier != job:
            raise VolleyError(f"{place} is of another version of the demo: remove it, or name another --folder")
        if run.state == "done":
            display.say(f"{job.name}: done earlier")
            return run
        checkpoint = newest_checkpoint_or_none(run)
    if checkpoint is None:
        shutil.rmtree(place, ignore_errors=True)
        run = RunFolder.at(place, job)
    else:
        display.say(f"{job.name}: continues after step {steps_of(checkpoint)}")
    result = await run_on(stack, prepare(job), run, display, checkpoint=checkpoint)
    display.say(f"{job.name}: {result.seconds:.0f} s")
    return run


def present(folder: Path, runs: Mapping[str, RunFolder], display: Display) -> None:
    """Print pass@k before and after, and samples; draw the plots."""
    rows = {"start": runs["mean"].read("evaluations")[0]}
    rows |= {name: run.read("evaluations")[-1] for name, run in runs.items()}
    (folder / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    curves = plots.compare_runs(runs, folder / "learning_curves.png", k=8)
    picture = plots.pass_at_k(
        rows,
        folder / "pass_at_k.png",
        title=f"{MODEL}, dequantised from 4 bits:\nreasoning-gym's chain_sum, held-out tasks",
    )
    display.console.print()
    display.console.print(results_table(rows))
    for name, run in runs.items():
        samples = run.read("samples")
        for when, shown in (("first", samples[:SHOWN]), ("last", samples[-SHOWN:])):
            display.console.print(f"\n{name}, samples of the {when} logged step:", markup=False)
            for each in shown:
                text = f"  {each['status']:13} {json.dumps(each['prompt'][-60:])} -> {json.dumps(each['sample'][:100])}"
                display.console.print(text, markup=False, soft_wrap=True)
    display.console.print(f"\npass@k           {picture}\nlearning curves  {curves}", soft_wrap=True)


def pretrained(folder: Path | None, display: Display) -> Path:
    """The model in ``folder``; with None, SmolLM2-135M-Instruct, fetched unless it was before."""
    model = (folder or Path("demo-llm") / MODEL).resolve()
    if folder is None and not model.exists():
        display.say("fetching SmolLM2-135M-Instruct with pip")
        display.say(str(fetch(MODEL, model)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps each, of adapters: shows that everything runs")
    parser.add_argument("--folder", type=Path, help="folder for the results; default: demo-llm/, or demo-llm/quick/")
    parser.add_argument("--model", type=Path, help="another model's folder [default: fetch SmolLM2-135M-Instruct]")
    args = parser.parse_args()
    folder = (args.folder or Path("demo-llm/quick" if args.quick else "demo-llm")).resolve()
    display, begun = Display(), time.monotonic()
    try:
        model = pretrained(args.model, display)
        folder.mkdir(parents=True, exist_ok=True)
        runs = run_in_foreground(run_all(folder, model, QUICK if args.quick else {}, display))
        present(folder, runs, display)
        display.say(f"wall time {(time.monotonic() - begun) / 60:.1f} min")
    except VolleyError as error:
        sys.exit(f"demo-llm: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


if __name__ == "__main__":
    main()
