"""What the tasks of all studies share: a folder with data and a warmed-up model."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reproductions.runs import Planned
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
