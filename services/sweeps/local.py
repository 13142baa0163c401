"""Runs of a sweep on this machine: one stack for all, a run folder for each."""

import contextlib
import json
import shutil
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.jobs.needs import check_host, needs_at_once, needs_of
from services.jobs.runtime_env import for_ray
from services.recording.display import Display
from services.runs.checkpoints import complete_checkpoints, newest_checkpoint_or_none
from services.runs.run import prepare_alone, run_on
from services.signals import StopSignal
from services.stack.ephemeral import Stack, local_stack
from services.store.desired import change_in_folder, read_desired
from services.store.folder import RunFolder
from services.sweeps.plan import Found, Records
from services.sweeps.spec import Member, Sweep
from services.sweeps.statistics import metrics_of
from volley.errors import JobError, VolleyError
from volley.job import RLJob, SFTJob


@dataclass(slots=True)
class LocalRunner:
    """Makes each run in ``folder / member.name``, in this process.

    Attributes:
        import_from: folder of the base job, with the job's own code.
        at_once: runs at the same time, for which the stack is made.
        keep_checkpoints: of runs that are done.
        redis_url, ray_address: servers to use instead of starting them.
        stack: one that is up; None starts one while there are runs to make.
    """

    folder: Path
    import_from: Path
    at_once: int = 1
    keep_checkpoints: bool = True
    redis_url: str | None = None
    ray_address: str | None = None
    stack: Stack | None = None
    _stack: Stack | None = field(default=None, init=False)

    async def find(self, sweep: Sweep) -> dict[str, Found]:
        """The run folders with a job; one without was interrupted before it began."""
        folders = sorted(file.parent for file in self.folder.glob("*/job.yaml"))
        return {folder.name: _found(folder) for folder in folders if not folder.name.startswith(".")}

    @contextlib.asynccontextmanager
    async def ready(self, members: Sequence[Member]) -> AsyncIterator[None]:
        """Start a stack with room for the largest runs at once, unless there is one."""
        if self.stack is not None:
            self._stack = self.stack
            yield
            return
        environments = {json.dumps(for_ray(each.job.runtime_env), sort_keys=True, default=str) for each in members}
        if len(environments) > 1:
            raise JobError("runtime_env differs between settings, and runs of one process share it: pass --submit")
        needs = needs_at_once([needs_of(each.job) for each in members], self.at_once)
        logs = self.folder / "stack"
        logs.mkdir(parents=True, exist_ok=True)
        check_host(needs, self.folder)
        async with local_stack(
            needs,
            logs,
            redis_url=self.redis_url,
            ray_address=self.ray_address,
            runtime_env=for_ray(members[0].job.runtime_env),
        ) as self._stack:
            yield

    async def run(self, member: Member, found: Found | None, stop_signal: StopSignal) -> Found:
        """Make the run; see `services.sweeps.plan.Runner`."""
        if self._stack is None:
            raise RuntimeError("run outside of ready")
        folder, checkpoint = self._prepared_folder(member, found)
        with folder.in_use():
            folder.write_summary({"state": "starting", "problem": ""})
            try:
                run = prepare_alone(member.job)
                await run_on(
                    *(self._stack, run, folder, Display(quiet=True)), checkpoint=checkpoint, stop_signal=stop_signal
                )
            except Exception as error:
                if not isinstance(error, VolleyError):
                    (folder.logs / "driver.log").write_text(traceback.format_exc())
                if folder.state == "starting":
                    folder.write_summary({"state": "failed", "problem": str(error)})
                raise
        ended = _found(folder.path)
        if ended.state == "done" and not self.keep_checkpoints:
            shutil.rmtree(folder.checkpoints)
        return ended

    async def progress(self, member: Member) -> str:
        observed = RunFolder(self.folder / member.name).observed()
        return "starts" if observed is None else f"{observed.state} {observed.step}/{observed.steps}"

    async def records(self, member: Member, found: Found) -> Records:
        folder = RunFolder(Path(found.where))
        return Records(metrics_of(folder.read("metrics")), folder.read("evaluations"))

    def _prepared_folder(self, member: Member, found: Found | None) -> tuple[RunFolder, Path | None]:
        """The member's run folder, and the checkpoint from which an rl run resumes.

        A run that cannot be resumed begins again in an empty folder. A failed run of another job is moved aside.
        """
        folder = RunFolder((self.folder / member.name).resolve())
        if found is not None and found.job == member.job and _resumable(folder, member):
            if (desired := read_desired(folder)).stopped or desired.paused:
                change_in_folder(folder, member.job, {"stopped": False, "paused": False})
            return folder, newest_checkpoint_or_none(folder) if isinstance(member.job, RLJob) else None
        if found is not None and found.job != member.job:
            _move_aside(folder.path)
        shutil.rmtree(folder.path, ignore_errors=True)
        folder = RunFolder.at(folder.path, member.job)
        folder.keep_import_from(self.import_from)
        return folder, None


def _found(path: Path) -> Found:
    folder, job = RunFolder.open(path)
    problem = str(folder.summary().get("problem", "")) if folder.state else ""
    return Found(folder.state, problem, job, str(folder.path))


def _resumable(folder: RunFolder, member: Member) -> bool:
    """Whether there is more than the beginning: a checkpoint, or prompts that were sampled already."""
    if not isinstance(member.job, RLJob | SFTJob):
        return True
    return folder.checkpoints.is_dir() and bool(complete_checkpoints(folder))


def _move_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f".{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
