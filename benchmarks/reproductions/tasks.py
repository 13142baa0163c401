"""What the tasks of all studies share: a folder with data, a warmed-up model and runs."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reproductions.runs import Options, Planned
from examples.countdown import make_data
from services.jobs.job_file import load_job
from services.recording.display import Display

EXAMPLES = Path(make_data.__file__).parent
RISING = 10  # steps in which the learning rate is warmed up


def make_once(data: Path, what: str, display: Display, make: Callable[[Path], None]) -> None:
    """Make the data and the untrained model of a task in the folder ``data``, unless this was done before."""
    if (data / "done").exists():
        return
    display.say(f"making {what} and an untrained model")
    data.mkdir(parents=True, exist_ok=True)
    make(data)
    (data / "done").touch()


def run_module(module: str, folder: Path) -> None:
    """Let a module write a model to ``folder``, in a separate process, which keeps torch out of this one."""
    subprocess.run([sys.executable, "-m", module, str(folder)], check=True, capture_output=True)


def warm_up_run(task: Path, steps: int, **settings: Any) -> Planned:
    """The supervised run of ``task`` that all its other runs start from."""
    data = task / "data"
    places = {"data.path": str(data / "sft.jsonl"), "model.path": str(data / "untrained"), "steps": steps}
    return Planned(task / "warm-up", load_job(EXAMPLES / "sft.yaml", places | settings))


def training_run(
    task: Path, name: str, seed: int, wanted: Options, *, prompts: int, rate: float, settings: dict[str, Any]
) -> Planned:
    """A run of ``task`` that starts from its warmed-up model.

    Args:
        prompts: prompts per step.
        rate: learning rate after its warm-up.
        settings: other settings of the job; they also override those above.
    """
    name = f"{name}-{seed}".replace("@", "-")
    common = {
        "name": name,
        "seed": seed,
        "steps": wanted.steps,
        "prompts_per_step": prompts,
        "optimizer": {"lr": rate, "warmup_steps": RISING, "clip_norm": 1.0},
        "samples_kept": 0,
        "model.path": str(task / "warm-up" / "model"),
        "data.path": str(task / "data" / "train.jsonl"),
        "evaluation.data.path": str(task / "data" / "heldout.jsonl"),
    }
    return Planned(task / name, load_job(EXAMPLES / "max8.yaml", common | settings))
