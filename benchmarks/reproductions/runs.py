"""Runs of a study: made where they are missing, on one stack, each in a folder of its own.

A run that is done is not made again: the same command goes on where it was cut, and studies share runs.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.display import Display
from services.job_file import Job, load_job
from services.needs import Needs, check_host, needs_of
from services.run import run_on
from services.run_folder import RunFolder
from services.stack import local_stack

Runs = Mapping[str, Sequence["Planned"]]  # by method, one a seed
MORE_TO_DO = 75  # exit status where --at-most left runs for the next call


@dataclass(frozen=True, slots=True)
class Planned:
    """A run, and the folder it leaves."""

    path: Path
    job: Job

    @property
    def done(self) -> bool:
        """Has this very job run to its end there? Fields that came since have their defaults."""
        if not (self.path / "summary.json").exists() or load_job(self.path / "job.yaml") != self.job:
            return False
        return bool(RunFolder(self.path).summary()["state"] == "done")


@dataclass(frozen=True, slots=True)
class Options:
    """The command line that all studies have.

    Attributes:
        folder: where runs are.
        out: where the figure and its numbers go.
        at_most: runs made before the command ends, None for all.
    """

    folder: Path
    out: Path
    seeds: int
    steps: int
    at_most: int | None


def options(description: str | None, *, seeds: int, steps: int) -> Options:
    """Read the command line; ``seeds`` and ``steps`` are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo/reproductions"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="where figure and numbers go")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--steps", type=int, default=steps, help="of a run")
    parser.add_argument(
        "--at-most", type=int, help=f"end after so many runs, with status {MORE_TO_DO} if more are left"
    )
    args = parser.parse_args()
    return Options(args.folder.resolve(), args.out.resolve(), args.seeds, args.steps, args.at_most)


def seed_by_seed(runs: Runs) -> list[Planned]:
    """Every method with one seed, then with the next."""
    return [run for of_seed in zip(*runs.values(), strict=True) for run in of_seed]


async def make_missing(plan: Sequence[Planned], wanted: Options, display: Display) -> int:
    """Make the runs of ``plan`` that are missing, in order, ``wanted.at_most`` of them; how many are left."""
    missing = [each for each in plan if not each.done]
    now = missing[: wanted.at_most]
    if now:
        display.say(f"{len(plan) - len(missing)} of {len(plan)} runs are there; making {len(now)}")
        needs = _most([needs_of(each.job) for each in now])
        wanted.folder.mkdir(parents=True, exist_ok=True)
        check_host(needs, wanted.folder)
        async with local_stack(needs, wanted.folder / "stack") as stack:
            for each in now:
                await _make(each, stack, display)
    return len(missing) - len(now)


async def _make(each: Planned, stack: Any, display: Display) -> None:
    shutil.rmtree(each.path, ignore_errors=True)
    result = await run_on(stack, each.job, RunFolder.at(each.path, each.job), display)
    shutil.rmtree(each.path / "checkpoints")
    display.say(f"{each.path.name}: {result.seconds:.0f} s")


def _most(needs: Sequence[Needs]) -> Needs:
    return max(needs, key=lambda each: (each.cpus, each.memory_bytes))
