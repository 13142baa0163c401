"""Run a job: check everything that can be checked first, start the roles, run, and leave a full run folder."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services import eval_run, rl_run, sft_run
from services.display import Display
from services.job_file import Job
from services.needs import check_host, needs_of
from services.run_folder import RunFolder
from services.stack import Stack, local_stack
from services.store import RunStore
from volley.errors import VolleyError
from volley.job import EvalJob, RLJob, SFTJob


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves.

    Attributes:
        folder: its run folder.
        model: the exported Hugging Face model, None for an evaluation.
        seconds: wall time, checks and start-up included.
    """

    folder: RunFolder
    model: Path | None
    seconds: float


def prepare(job: Job) -> Any:
    """Everything of ``job`` that can be checked and read before a process starts.

    Raises:
        JobError: the data, the model or the scorer can not be used.
    """
    match job:
        case RLJob():
            return rl_run.prepare(job)
        case SFTJob():
            return sft_run.prepare(job)
        case EvalJob():
            return eval_run.prepare(job)


async def run_alone(
    job: Job,
    folder: RunFolder,
    display: Display,
    *,
    prepared: Any,
    checkpoint: Path | None = None,
    redis_url: str | None = None,
    ray_address: str | None = None,
) -> Result:
    """Run ``job`` on a stack of its own (or on the servers named) and end the stack with it."""
    with folder.in_use():
        folder.write_summary({"state": "starting", "problem": ""})
        try:
            needs = needs_of(job)
            check_host(needs, folder.path)
            async with local_stack(needs, folder.logs, redis_url=redis_url, ray_address=ray_address) as stack:
                return await run_on(stack, job, folder, display, prepared=prepared, checkpoint=checkpoint)
        except VolleyError as error:
            if folder.summary()["state"] == "starting":
                folder.write_summary({"state": "failed", "problem": str(error)})
            raise


async def run_on(
    stack: Stack,
    job: Job,
    folder: RunFolder,
    display: Display,
    *,
    prepared: Any = None,
    checkpoint: Path | None = None,
) -> Result:
    """Run ``job`` on a stack that is up, from the start or from ``checkpoint``.

    Its record and summary say how it ended, whatever the end.
    """
    begun = time.monotonic()
    prepared = prepared if prepared is not None else prepare(job)
    async with RunStore(stack.redis_url, folder.run_id) as store:
        record = {"id": folder.run_id, "name": job.name, "kind": job.kind, "folder": str(folder.path)}
        await store.put_record({**record, "state": "running", "started": time.time()})
        folder.write_summary({**record, "state": "running", "problem": ""})
        state, problem = "failed", "ended by an unexpected error"
        try:
            match job:
                case RLJob():
                    await rl_run.run(job, prepared, folder, store, display, checkpoint)
                case SFTJob():
                    await sft_run.run(job, prepared, folder, store, display)
                case EvalJob():
                    await eval_run.run(job, prepared, folder, store, display)
            state, problem = "done", ""
        except asyncio.CancelledError:
            state, problem = "stopped", "stopped by its user"
            raise
        except VolleyError as error:
            problem = str(error)
            raise
        finally:
            seconds = time.monotonic() - begun
            summary = {**record, "state": state, "problem": problem, "seconds": seconds}
            folder.write_summary(summary)
            with contextlib.suppress(VolleyError):  # Redis may be the reason for the end; the summary is on disk
                await store.put_record({**summary, "ended": time.time()})
    model = None if isinstance(job, EvalJob) else folder.model
    return Result(folder, model, seconds)
