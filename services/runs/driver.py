"""The process of one run of the service: ``python -m services.runs.driver RUN_ID``, started as a Ray job.

    Redis ─> record ─> run folder, locked ─> its newest checkpoint, or the start ─> `services.runs.run.run_on`

The driver knows only what the record and the run folder say, so any driver can resume where another one died.

It exits with 0 if the run is done or was stopped as desired; with 130 if a signal stopped it, at a checkpoint if the
run reached one within its ``checkpoint.grace_s``; otherwise with 1. A run whose job is at fault has failed. A run whose
driver died, was stopped by a signal or failed for another reason is given another driver.
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

from services.jobs.job_file import Job, explain
from services.jobs.needs import Needs
from services.jobs.runtime_env import for_ray
from services.recording.display import Display
from services.runs.checkpoints import newest_checkpoint_or_none
from services.runs.run import prepare_alone, run_on
from services.signals import StopSignal, leave_soon, run_in_foreground
from services.stack.ephemeral import Stack
from services.stack.ray import ray_cluster
from services.store.folder import RunFolder
from services.store.redis import Store
from volley.base import replaced
from volley.errors import DeadlineExceeded, HostError, JobError, VolleyError, WorkerDied
from volley.job import JOB, RLJob
from volley.processes import redirect_output
from volley.state import ENDED, RunRecord, RunState

# These are not the job's fault: another driver, perhaps on other nodes, may get further. The supervisor counts them.
RETRIABLE = (WorkerDied, DeadlineExceeded, HostError, RayError)
LOCK_SECONDS = 60.0  # a killed driver may hold the folder until its last thread has ended


def main(arguments: list[str]) -> int:
    """The driver's exit code."""
    if len(arguments) != 1 or "VOLLEY_REDIS_URL" not in os.environ:
        sys.stderr.write("usage: VOLLEY_REDIS_URL=redis://... python -m services.runs.driver RUN_ID\n")
        return 2
    stop_signal = StopSignal()
    try:
        run_in_foreground(drive(arguments[0], os.environ["VOLLEY_REDIS_URL"], stop_signal), stop_signal)
    except KeyboardInterrupt:
        return 130
    except VolleyError as error:
        sys.stderr.write(f"volley: {error}\n")
        return 1
    return 0


async def drive(run_id: str, redis_url: str, stop_signal: StopSignal) -> None:
    """Run the job to its end, and leave the final state in Redis.

    Raises:
        JobError: there is no such run, or its job cannot be used.
        VolleyError: whatever `services.runs.run.run_on` raises.
    """
    async with Store(redis_url) as store:
        record = await store.record(run_id)
        if record is None:
            raise JobError(f"there is no run {run_id} in Redis")
        try:
            job = _job_of(record)
            folder = RunFolder.at(Path(record.folder), job)
            redirect_output(folder.logs / "driver.log")  # in the run folder, which outlives the cluster's own logs
            async with _locked(folder):
                if _done(folder):  # the previous driver could not report it because Redis was down
                    await _report_end(store, run_id, "done", "")
                else:
                    await _run(job, folder, redis_url, stop_signal)
        except JobError as error:
            await _report_end(store, run_id, "failed", str(error))
            raise
        except asyncio.CancelledError:
            await _report_signal(store, run_id)
            raise
        except RETRIABLE as error:
            await _report_interruption(store, run_id, str(error))
            raise


async def _run(job: Job, folder: RunFolder, redis_url: str, stop_signal: StopSignal) -> None:
    run = await asyncio.to_thread(prepare_alone, job)
    checkpoint = _resume_point(job, folder)
    address, runtime_env = os.environ.get("RAY_ADDRESS", "auto"), for_ray(job.runtime_env)
    with ray_cluster(Needs(0, 0, 0, 0), address, runtime_env=runtime_env) as ray_address:
        stack = Stack(redis_url, ray_address)
        display = Display()
        await run_on(stack, run, folder, display, checkpoint=checkpoint, stop_signal=stop_signal, signalled="queued")


def _job_of(record: RunRecord) -> Job:
    if Path(record.folder).name != record.id:
        raise JobError(f"run {record.id} has the folder {record.folder}: a run's folder is named after it")
    try:
        return JOB.validate_python(record.job)
    except ValidationError as error:
        raise JobError(explain(f"run {record.id}", error)) from error


def _resume_point(job: Job, folder: RunFolder) -> Path | None:
    """The newest checkpoint of an rl job. If there is none, rows of earlier drivers are removed from the folder.

    Runs of the other kinds find out themselves what the folder already holds.
    """
    if not isinstance(job, RLJob):
        return None
    checkpoint = newest_checkpoint_or_none(folder)
    if checkpoint is None:
        folder.rewind(0)
    return checkpoint


def _done(folder: RunFolder) -> bool:
    try:
        return bool(folder.summary()["state"] == "done")
    except (FileNotFoundError, ValueError):  # never run, or killed while the file was written
        return False


async def _report_end(store: Store, run_id: str, state: RunState, problem: str) -> None:
    """Report the end of the run, unless it has been reported already."""
    observed = await store.observed(run_id)
    if observed.state not in ENDED:
        now = time.time()
        await store.put_observed(run_id, replaced(observed, state=state, problem=problem, updated=now, ended=now))


async def _report_interruption(store: Store, run_id: str, problem: str) -> None:
    """Report that the run has not failed: it continues with another driver."""
    observed = await store.observed(run_id)
    if observed.state == "failed":
        now = time.time()
        interrupted = replaced(observed, state="starting", problem=problem, updated=now, ended=None)
        await store.put_observed(run_id, interrupted)


async def _report_signal(store: Store, run_id: str) -> None:
    """Report that a signal stopped this driver. The run has not failed, and its user has not stopped it."""
    observed = await store.observed(run_id)
    if observed.state not in ("done", "failed") and not (await store.desired(run_id)).stopped:
        problem = "a signal stopped its driver; the run continues with another one"
        await store.put_observed(run_id, replaced(observed, state="queued", problem=problem, updated=time.time()))


@contextlib.asynccontextmanager
async def _locked(folder: RunFolder) -> AsyncIterator[None]:
    """Hold the run folder's lock, after waiting for a previous driver that is about to end."""
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


if __name__ == "__main__":
    exit_code = 1
    try:
        exit_code = main(sys.argv[1:])
    finally:
        leave_soon(exit_code)
    sys.exit(exit_code)
