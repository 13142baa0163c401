"""Jobs of the countdown studies: those of ``examples/countdown``, with one thing changed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.reproductions.runs import Options, Planned
from examples.countdown import make_data
from services.display import Display
from services.job_file import load_job

EXAMPLES = Path(make_data.__file__).parent
HELDOUT, SUPERVISED, TRAIN = 200, 76_800, 9_600
# Half of the example's prompts a step, for twice the steps in the same time; with fewer prompts a smaller rate, that is
# reached in steps: at the example's 3e-4 the first twenty noisy updates cost more than the rest could win back.
PROMPTS, RATE, RISING = 16, 1.5e-4, 10
OBJECTIVES: dict[str, dict[str, Any]] = {
    "mean": {"kind": "mean"},
    **{f"max@{k}": {"kind": "max_at_k", "k": k, "center": True} for k in (4, 8, 16)},
}


def task(wanted: Options, numbers: int = 4) -> Path:
    """The folder of the task with so many numbers: its data, its warmed up model and its runs."""
    return wanted.folder / f"countdown-{numbers}"


def inputs(wanted: Options, display: Display, numbers: int = 4) -> None:
    """Data and an untrained model, unless they are there."""
    data = task(wanted, numbers) / "data"
    if (data / "done").exists():
        return
    display.say(f"making data of {numbers} numbers and an untrained model")
    make_data.make(data, supervised=SUPERVISED, train=TRAIN, heldout=HELDOUT, numbers=numbers)
    untrained(data / "untrained")
    (data / "done").touch()


def untrained(folder: Path) -> None:
    """The example's model, written by a process of its own: torch stays out of this one."""
    command = [sys.executable, "-m", "examples.countdown.make_model", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def warm_up(wanted: Options, numbers: int = 4, steps: int = 600) -> Planned:
    """Supervised steps, that every run of the task starts from."""
    folder = task(wanted, numbers)
    places = {"data.path": str(folder / "data" / "sft.jsonl"), "model.path": str(folder / "data" / "untrained")}
    return Planned(folder / "warm-up", load_job(EXAMPLES / "sft.yaml", {**places, "steps": steps}))


def trained(wanted: Options, name: str, seed: int, *, numbers: int = 4, first: bool = False, **changes: Any) -> Planned:
    """A run of ``name``, an objective or the name of ``changes`` to the job, with one seed.

    Args:
        first: it evaluates the model it starts from, too.
        changes: of the job, double underscores for dots.
    """
    folder = task(wanted, numbers)
    settings: dict[str, Any] = {
        "name": f"{name}-{seed}".replace("@", "-"),
        "seed": seed,
        "steps": wanted.steps,
        "prompts_per_step": PROMPTS,
        "optimizer": {"lr": RATE, "warmup_steps": RISING},
        "model.path": str(folder / "warm-up" / "model"),
        "data.path": str(folder / "data" / "train.jsonl"),
        "evaluation.data.path": str(folder / "data" / "heldout.jsonl"),
        "evaluation.at_start": first,
        "samples_kept": 0,
        "sampling.max_tokens": 2 * numbers + 2,
        "evaluation.sampling.max_tokens": 2 * numbers + 2,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    if name in OBJECTIVES:
        settings["objective"] = OBJECTIVES[name]
    return Planned(folder / settings["name"], load_job(EXAMPLES / "max8.yaml", settings))
