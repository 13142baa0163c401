"""Data and start of the countdown studies: those of ``examples/countdown`` in other sizes."""

from pathlib import Path

from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.tasks import make_once, run_module, warm_up_run
from examples.countdown import make_data
from services.recording.display import Display

HELDOUT, SUPERVISED, TRAIN = 200, 76_800, 9_600


def task(wanted: Options, numbers: int = 4) -> Path:
    """The folder of the task with ``numbers`` numbers: its data, its warmed-up model and its runs."""
    return wanted.folder / f"countdown-{numbers}"


def inputs(wanted: Options, display: Display, numbers: int = 4) -> None:
    """Make the data and an untrained model, unless they exist."""

    def make(data: Path) -> None:
        make_data.make(data, supervised=SUPERVISED, train=TRAIN, heldout=HELDOUT, numbers=numbers)
        untrained(data / "untrained")

    make_once(task(wanted, numbers) / "data", f"data with {numbers} numbers", display, make)


def untrained(folder: Path) -> None:
    """Write the example's model."""
    run_module("examples.countdown.make_model", folder)


def warm_up(wanted: Options, numbers: int = 4, steps: int = 600) -> Planned:
    """The supervised run that all other runs of the task start from."""
    return warm_up_run(task(wanted, numbers), steps)
