"""A pretrained model learns to use a tool: ``make demo-tools``.

    fetch SmolLM2-135M-Instruct -> warm-up on conversations, two in five with a call -> RL on right answers -> figures

The tasks are sums of long numbers and products, which the model cannot compute in its head and one line of Python can.
Results are written to ``demo-tools/``, or to ``demo-tools/quick/`` with ``--quick``. The same command continues a demo
that was interrupted.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.countdown.demo import results_table
from examples.smollm2.demo import pretrained, run_one
from examples.tool_use.make_data import expression, give_template, write_conversations
from services.jobs.job_file import Job, load_job
from services.jobs.machine import bfloat16_notice
from services.jobs.needs import check_host, needs_of
from services.recording.display import Display
from services.signals import run_in_foreground
from services.stack.ephemeral import local_stack
from services.store.folder import RunFolder
from volley.errors import VolleyError
from volley.objectives import bootstrap_interval

HERE = Path(__file__).parent
CALLING = 0.4  # share of the warm-up's conversations that call the tool
WARM_UP_TASKS, WARM_UP_SEED = 320, 2
NO_TOOL: dict[str, Any] = {"rollout": None, "gateway": {}, "data.chat": {}}
Changes = Mapping[str, Mapping[str, Any]]
FULL: Changes = {"warm-up": {}, "tools": {}, "eval": {}}
QUICK: Changes = {
    "warm-up": {"steps": 2, "checkpoint.every": 1},
    "tools": {"steps": 2, "checkpoint.every": 1},
    "eval": {"data.size": 4},
}
SHOWN = 3  # episodes printed per evaluation


def jobs_of(folder: Path, changes: Changes) -> dict[str, Job]:
    """The jobs in the order in which they run; those that evaluate begin with ``eval-``.

    They compute in bfloat16 where the processor has instructions for it, which is faster.
    """
    dtype = "float32" if bfloat16_notice(load_job(HERE / "rl.yaml", {"model.dtype": "bfloat16"})) else "bfloat16"
    warm, trained = folder / "warm-up" / "model", folder / "tools" / "model"

    def job(file: str, model: Path, more: Mapping[str, Any], kind: str) -> Job:
        return load_job(HERE / file, {"model.path": str(model), "model.dtype": dtype, **more, **changes[kind]})

    taught = {"data.path": str(folder / "conversations.jsonl")}
    jobs = [
        job("eval.yaml", folder / "pretrained", {"name": "eval-pretrained", **NO_TOOL}, "eval"),
        job("warm_up.yaml", folder / "pretrained", taught, "warm-up"),
        job("eval.yaml", warm, {"name": "eval-warm-up"}, "eval"),
        job("rl.yaml", warm, {}, "tools"),
        job("eval.yaml", trained, {"name": "eval-trained"}, "eval"),
    ]
    return {each.name: each for each in jobs}


def make_inputs(folder: Path, model: Path, display: Display) -> None:
    """Make the warm-up's data and the model with a template for tools, unless they exist."""
    if (folder / "conversations.jsonl").exists():
        return
    display.say("making conversations")
    give_template(model, folder / "pretrained")
    tasks = load_job(HERE / "rl.yaml").data.model_copy(update={"size": WARM_UP_TASKS, "seed": WARM_UP_SEED})
    write_conversations(folder / "conversations.jsonl", tasks, CALLING)


async def run_all(folder: Path, jobs: Mapping[str, Job], display: Display) -> dict[str, RunFolder]:
    """Run the jobs one after the other on one stack."""
    needs = needs_of(jobs["tools"])
    check_host(needs, folder)
    async with local_stack(needs, folder / "stack") as stack:
        return {name: await run_one(stack, folder / name, job, display) for name, job in jobs.items()}


def calling_share(samples: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """The share of episodes that called the tool, and its 95% interval over prompts."""
    called: dict[str, list[bool]] = {}
    for each in samples:
        called.setdefault(each["prompt_id"], []).append(len(each["calls"]) > 1)
    shares = [float(np.mean(episodes)) for episodes in called.values()]
    return (float(np.mean(shares)), *bootstrap_interval(shares))


def present(folder: Path, runs: Mapping[str, RunFolder], display: Display) -> None:
    """Print pass@k, the share of episodes with a call, and episodes; name the figure, which the rl run has drawn."""
    evaluated = {name.removeprefix("eval-"): run for name, run in runs.items() if name.startswith("eval-")}
    rows = {name: run.read("evaluations")[-1] for name, run in evaluated.items()}
    samples = {name: run.read("samples") for name, run in evaluated.items()}
    shares = {name: calling_share(of_run) for name, of_run in samples.items() if name != "pretrained"}
    results = {name: {**row, "calling": shares.get(name)} for name, row in rows.items()}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    figure = shutil.copyfile(runs["tools"].plots / "learning_curves.png", folder / "learning_curves.png")
    display.console.print()
    display.console.print(results_table(rows, "model"))
    for name, (mean, low, high) in shares.items():
        display.console.print(f"{name}: {mean:.1%} ({low:.0%} to {high:.0%}) of episodes call the tool", markup=False)
    for name, of_run in samples.items():
        display.console.print(f"\n{name}:", markup=False)
        for each in of_run[:: max(1, len(of_run) // SHOWN)][:SHOWN]:
            said = [call["answer"] for call in each["calls"]] if "calls" in each else [each["sample"]]
            text = (
                f"  {each['status']:13} {expression(each['prompt'])} -> {' -> '.join(repr(one[:100]) for one in said)}"
            )
            display.console.print(text, markup=False, soft_wrap=True)
    display.console.print(f"\nlearning curves  {figure}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps each: shows that everything runs")
    parser.add_argument(
        "--folder", type=Path, help="folder for the results; default: demo-tools/, or demo-tools/quick/"
    )
    parser.add_argument("--model", type=Path, help="another model's folder [default: fetch SmolLM2-135M-Instruct]")
    args = parser.parse_args()
    folder = (args.folder or Path("demo-tools/quick" if args.quick else "demo-tools")).resolve()
    display, begun = Display(), time.monotonic()
    try:
        model = pretrained(args.model, display)
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(folder, model, display)
        jobs = jobs_of(folder, QUICK if args.quick else FULL)
        if args.quick:
            del jobs["eval-warm-up"]  # the one that shows nothing new
        runs = run_in_foreground(run_all(folder, jobs, display))
        present(folder, runs, display)
        display.say(f"wall time {(time.monotonic() - begun) / 60:.1f} min")
    except VolleyError as error:
        sys.exit(f"demo-tools: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


if __name__ == "__main__":
    main()
