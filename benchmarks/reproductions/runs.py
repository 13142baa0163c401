"""The options of every study, and the runs that sweeps start from, each made once in its own folder."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.jobs.job_file import Job, load_job
from services.jobs.needs import Needs, check_host, needs_of
from services.recording.display import Display
from services.runs.run import prepare, run_on
from services.stack.ephemeral import local_stack
from services.store.folder import RunFolder

Runs = Mapping[str, Sequence["Planned"]]  # by method, one run per seed
MORE_TO_DO = 75  # exit status if --at-most left runs for the next call


@dataclass(frozen=True, slots=True)
class Planned:
    """A run's job and its folder."""

    path: Path
    job: Job

    @property
    def done(self) -> bool:
        """Whether exactly this job has run to its end there; fields that its saved file lacks count as defaults."""
        if not (self.path / "summary.json").exists() or load_job(self.path / "job.yaml") != self.job:
            return False
        return bool(RunFolder(self.path).summary()["state"] == "done")


@dataclass(frozen=True, slots=True)
class Options:
    """The command-line options of every study.

    Attributes:
        folder: where runs are kept.
        out: where the figure and its numbers are written.
        seeds: how many, from 1; None for those of the sweep file.
        steps: of each run; None for those of the sweep file.
        at_most: how many runs the command makes at most; None for all.
    """

    folder: Path
    out: Path
    seeds: int | None = None
    steps: int | None = None
    at_most: int | None = None


def options(description: str | None) -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo/reproductions"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="where figure and numbers are written")
    parser.add_argument("--seeds", type=int, help="seeds from 1 on, in place of those of the sweep file")
    parser.add_argument("--steps", type=int, help="steps of each run, in place of those of the sweep file")
    parser.add_argument(
        "--at-most", type=int, help=f"make at most this many runs; exit with status {MORE_TO_DO} if any are left"
    )
    args = parser.parse_args()
    return Options(args.folder.resolve(), args.out.resolve(), args.seeds, args.steps, args.at_most)


async def make_missing(plan: Sequence[Planned], wanted: Options, display: Display) -> int:
    """Make at most ``wanted.at_most`` of the missing runs of ``plan``, in order; returns how many are left."""
    missing = [each for each in plan if not each.done]
    now = missing[: wanted.at_most]
    if now:
        display.say(f"{len(plan) - len(missing)} of {len(plan)} runs are done; making {len(now)}")
        needs = _most([needs_of(each.job) for each in now])
        wanted.folder.mkdir(parents=True, exist_ok=True)
        check_host(needs, wanted.folder)
        async with local_stack(needs, wanted.folder / "stack") as stack:
            for each in now:
                await _make(each, stack, display)
    return len(missing) - len(now)


async def _make(each: Planned, stack: Any, display: Display) -> None:
    shutil.rmtree(each.path, ignore_errors=True)
    result = await run_on(stack, prepare(each.job), RunFolder.at(each.path, each.job), display)
    shutil.rmtree(each.path / "checkpoints")
    display.say(f"{each.path.name}: {result.seconds:.0f} s")


def _most(needs: Sequence[Needs]) -> Needs:
    return max(needs, key=lambda each: (each.cpus, each.memory_bytes))
