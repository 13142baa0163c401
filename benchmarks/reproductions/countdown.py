"""Jobs of the countdown studies: the jobs of ``examples/countdown`` with a few settings changed."""

from pathlib import Path
from typing import Any

from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.tasks import make_once, run_module, training_run, warm_up_run
from examples.countdown import make_data
from services.recording.display import Display

HELDOUT, SUPERVISED, TRAIN = 200, 76_800, 9_600
# Half of the example's prompts per step allows twice the steps in the same time. Fewer prompts make noisier updates, so
# the rate is smaller and warmed up: at the example's 3e-4, the first twenty updates lost more than the rest regained.
PROMPTS, RATE = 16, 1.5e-4
OBJECTIVES: dict[str, dict[str, Any]] = {
    "mean": {"kind": "mean"},
    **{f"max@{k}": {"kind": "max_at_k", "k": k, "center": True} for k in (4, 8, 16)},
}


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


def trained(wanted: Options, name: str, seed: int, *, numbers: int = 4, first: bool = False, **changes: Any) -> Planned:
    """A run named ``name``, with the objective of that name if there is one.

    Args:
        first: whether it also evaluates the model it starts from.
        changes: other settings of the job, with double underscores instead of dots.
    """
    settings: dict[str, Any] = {
        "evaluation.at_start": first,
        "sampling.max_tokens": 2 * numbers + 2,
        "evaluation.sampling.max_tokens": 2 * numbers + 2,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    if name in OBJECTIVES:
        settings["objective"] = OBJECTIVES[name]
    return training_run(task(wanted, numbers), name, seed, wanted, prompts=PROMPTS, rate=RATE, settings=settings)
