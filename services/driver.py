"""The process of one run of the service: ``python -m services.driver RUN_ID``, started as a Ray job.

    Redis ─> record ─> run folder, locked ─> its newest checkpoint, or the start ─> `services.run.run_on`

What the record and the folder say is all it knows, so that any driver can go on where another one died. It ends with
code 0 when the run is done or was stopped as desired, 130 when a signal stopped it (at a checkpoint, if the run came
to one within its `checkpoint.grace_s`), else 1. A run whose job is at fault
has failed; one whose driver died, was stopped by a signal or met with a misfortune is given another.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import ValidationError
from ray.exceptions import RayError

from services.checkpoints import complete_checkpoints, newest_checkpoint
from services.display import Display
from services.foreground import Ending, run_in_foreground
from services.job_file import Job, explain
from services.local_ray import ray_cluster
from services.needs import Needs
from services.run import prepare_alone, run_on
from services.run_folder import RunFolder
from services.runtime_env import for_ray
from services.stack import Stack
from services.state import ENDED, RunRecord, RunState
from services.store import Store
from volley.errors import DeadlineExceeded, HostError, JobError, VolleyError, WorkerDied
from volley.job import JOB, RLJob

# Not the fault of the job: another driver, perhaps on other nodes, may get further. The supervisor counts them.
MISFORTUNES = (WorkerDied, DeadlineExceeded, HostError, RayError)
LOCK_SECONDS = 60.0  # a killed driver may hold the folder until its last thread is gone


def main(arguments: list[str]) -> int:
    """The driver's exit code."""
    if len(arguments) != 1 or "VOLLEY_REDIS_URL" not in os.environ:
        sys.stderr.write("usage: VOLLEY_REDIS_URL=redis://... python -m services.driver RUN_ID\n")
        return 2
    ending = Ending()
    try:
        run_in_foreground(drive(arguments[0], os.environ["VOLLEY_REDIS_URL"], ending), ending)
    except KeyboardInterrupt:
        return 130
    except VolleyError as error:
        sys.stderr.write(f"volley: {error}\n")
        return 1
    return 0


async def drive(run_id: str, redis_url: str, ending: Ending) -> None:
    """Bring the run to its end, which its state tells.

    Raises:
        JobError: there is no such run, or its job can not be used.
        VolleyError: as `services.run.run_on` raises.
    """
    async with Store(redis_url) as store:
        record = await store.record(run_id)
        if record is None:
            raise JobError(f"there is no run {run_id} in Redis")
        try:
            job = _job_of(record)
            folder = RunFolder.at(Path(record.folder), job)
            _log_to(folder.logs / "driver.log")
            async with _locked(folder):
                if _done(folder):  # the driver before could not say so: Redis was away
                    await _say_ended(store, run_id, "done", "")
                else:
                    await _run(job, folder, redis_url, ending)
        except JobError as error:
            await _say_ended(store, run_id, "failed", str(error))
            raise
        except asyncio.CancelledError:
            await _say_told_to_end(store, run_id)
            raise
        except MISFORTUNES as error:
            await _say_interrupted(store, run_id, str(error))
            raise


async def _run(job: Job, folder: RunFolder, redis_url: str, ending: Ending) -> None:
    prepared = await asyncio.to_thread(prepare_alone, job)
    checkpoint = _resume_point(job, folder)
    address, shipped = os.environ.get("RAY_ADDRESS", "auto"), for_ray(job.runtime_env)
    with ray_cluster(Needs(0, 0, 0, 0), address, runtime_env=shipped) as ray_address:
        stack, display = Stack(redis_url, ray_address), Display()
        await run_on(stack, job, folder, display, prepared=prepared, checkpoint=checkpoint, ending=ending)


def _job_of(record: RunRecord) -> Job:
    if Path(record.folder).name != record.id:
        raise JobError(f"run {record.id} has the folder {record.folder}: a run's folder is named after it")
    try:
        return JOB.validate_python(record.job)
    except ValidationError as error:
        raise JobError(explain(f"run {record.id}", error)) from error


def _resume_point(job: Job, folder: RunFolder) -> Path | None:
    """The newest checkpoint of an rl job; where there is none the folder is taken back to the start.

    Runs of other kinds find out by themselves what the folder holds already.
    """
    if not isinstance(job, RLJob):
        return None
    if complete_checkpoints(folder):
        return newest_checkpoint(folder)
    folder.rewind(0)
    return None


def _done(folder: RunFolder) -> bool:
    try:
        return bool(folder.summary()["state"] == "done")
    except (FileNotFoundError, ValueError):  # never run, or killed while it wrote
        return False


async def _say_ended(store: Store, run_id: str, state: RunState, problem: str) -> None:
    """The run's end, unless it is told already."""
    observed = await store.observed(run_id)
    if observed.state not in ENDED:
        now = time.time()
        changes = {"state": state, "problem": problem, "updated": now, "ended": now}
        await store.put_observed(run_id, observed.model_copy(update=changes))


async def _say_interrupted(store: Store, run_id: str, problem: str) -> None:
    """The run has not failed by this: it goes on with another driver."""
    observed = await store.observed(run_id)
    if observed.state == "failed":
        changes = {"state": "starting", "problem": problem, "updated": time.time(), "ended": None}
        await store.put_observed(run_id, observed.model_copy(update=changes))


async def _say_told_to_end(store: Store, run_id: str) -> None:
    """A signal is no wish of the run's user: another driver goes on. Nor is it the run's fault, however early."""
    observed = await store.observed(run_id)
    if observed.state not in ("done", "failed") and not (await store.desired(run_id)).stopped:
        problem = "its driver was told to end; it goes on with another by itself"
        changes = {"state": "stopped", "problem": problem, "updated": time.time()}
        await store.put_observed(run_id, observed.model_copy(update=changes))


@contextlib.asynccontextmanager
async def _locked(folder: RunFolder) -> AsyncIterator[None]:
    """Hold the run folder; a predecessor that is about to be gone is waited for."""
    deadline = time.monotonic() + LOCK_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder.in_use())
                break
            except HostError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.5)
        yield


def _log_to(file: Path) -> None:
    """This process's output, native libraries' too, goes to the run folder: it outlives the cluster's own logs."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
