"""Small Python functions inferred from examples and judged in the sandbox: does the model's pass rate rise?

    python -m benchmarks.reproductions.code_task [--seeds 1] [--steps 100] [--at-most 4]

An untrained model of 0.8 million parameters is warmed up by supervised steps on programs, then trained only on the
verdicts of the ``code`` scorer: eight assertions, five of which the prompt does not show.
"""

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reproductions.countdown import OBJECTIVES
from benchmarks.reproductions.runs import Options, Planned
from benchmarks.reproductions.study import Study
from benchmarks.reproductions.tasks import make_once, run_module, training_run, warm_up_run
from services.recording.display import Display

WARM_UP = 300
METHODS = ("mean",)
PROMPTS, RATE = 8, 1.5e-4
LONGEST = 34  # tokens of the longest correct program, including the end of text


def task(wanted: Options) -> Path:
    return wanted.folder / "programs"


def inputs(wanted: Options, display: Display) -> None:
    """Make the data and an untrained model, unless they exist."""
    make = partial(run_module, "benchmarks.reproductions.programs")
    make_once(task(wanted) / "data", "programs", display, make)


def warm_up(wanted: Options) -> Planned:
    """The supervised run on programs that all others start from."""
    return warm_up_run(task(wanted), WARM_UP, name="programs-warm-up", rows_per_step=64)


def trained(wanted: Options, name: str, seed: int) -> Planned:
    """A run with the objective ``name``."""
    settings: dict[str, Any] = {
        "samples_kept": 16,
        "scorer": {"kind": "code", "extract": "raw", "values": {"passed": 1, "failed": 0}},
        "objective": OBJECTIVES[name],
        "sampling.max_tokens": LONGEST,
        "actors.max_num_seqs": 256,
        "evaluation.sampling": {"n": 16, "max_tokens": LONGEST},
        "evaluation.ks": [1, 2, 4, 8, 16],
        "reward_workers.count": 2,  # scoring takes longest
        "evaluation.at_start": (name, seed) == ("mean", 1),
    }
    return training_run(task(wanted), f"programs-{name}", seed, wanted, prompts=PROMPTS, rate=RATE, settings=settings)


def runs(wanted: Options) -> dict[str, list[Planned]]:
    """Each objective's runs, one per seed."""
    return {name: [trained(wanted, name, seed) for seed in range(1, wanted.seeds + 1)] for name in METHODS}


STUDY = Study("code_task", inputs, warm_up, runs)

if __name__ == "__main__":
    STUDY.conduct(__doc__, seeds=1, steps=100)
