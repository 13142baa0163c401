"""Run a job: check everything that can be checked first, start the roles, run, and leave a full run folder."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reward_servers.scorers import brings_code
from services import eval_run, rft_run, rl_run, sft_run
from services.adapters import check_adapters
from services.context import Context, RunStopped, beating, ends_when_stopped
from services.display import Display
from services.foreground import Ending
from services.job_file import Job
from services.needs import check_host, needs_of
from services.outbox import Outbox
from services.recorder import RunRecorder
from services.run_folder import RunFolder
from services.runtime_env import for_ray, make_importable
from services.sinks.sinks import Sinks, check_sinks
from services.stack import Stack, local_stack
from services.state import RunRecord, RunState
from services.status import Status
from services.store import Store
from services.tokens import import_tokenizers_alone
from volley.errors import VolleyError
from volley.job import EvalJob, RFTJob, RLJob, SFTJob


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves.

    Attributes:
        folder: its run folder.
        model: the exported Hugging Face model; None for an evaluation, or a run that was stopped before its end.
        seconds: wall time, checks and start-up included.
        state: how it ended.
    """

    folder: RunFolder
    model: Path | None
    seconds: float
    state: RunState


def prepare(job: Job) -> Any:
    """Everything of ``job`` that can be checked and read before a process starts.

    Raises:
        JobError: the data, the model, its adapters, the scorer or a sink can not be used.
    """
    check_sinks(job.sinks)
    make_importable(job.runtime_env)
    prepared = _prepared(job)
    check_adapters(job.model)
    return prepared


def _prepared(job: Job) -> Any:
    match job:
        case RLJob():
            return rl_run.prepare(job)
        case SFTJob():
            return sft_run.prepare(job)
        case RFTJob():
            return rft_run.prepare(job)
        case EvalJob():
            return eval_run.prepare(job)


def prepare_alone(job: Job) -> Any:
    """`prepare`, sooner, in a process that needs nothing of transformers but tokenizers; code of the user's own may."""
    if isinstance(job, SFTJob) or not brings_code(job.scorer):
        import_tokenizers_alone()
    return prepare(job)


async def run_alone(
    job: Job,
    folder: RunFolder,
    display: Display,
    *,
    prepared: Any,
    checkpoint: Path | None = None,
    redis_url: str | None = None,
    ray_address: str | None = None,
    ending: Ending | None = None,
) -> Result:
    """Run ``job`` on a stack of its own (or on the servers named) and end the stack with it."""
    with folder.in_use():
        folder.write_summary({"state": "starting", "problem": ""})
        try:
            needs = needs_of(job)
            check_host(needs, folder.path)
            shipped = for_ray(job.runtime_env)
            async with local_stack(
                needs, folder.logs, redis_url=redis_url, ray_address=ray_address, runtime_env=shipped
            ) as stack:
                return await run_on(
                    stack, job, folder, display, prepared=prepared, checkpoint=checkpoint, ending=ending
                )
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
    ending: Ending | None = None,
) -> Result:
    """Run ``job`` on a stack that is up, from the start or from ``checkpoint``.

    Its observed state and its summary say how it ended, whatever the end.

    Args:
        ending: how a signal ends it; None: by cancelling it.
    """
    begun = time.monotonic()
    prepared = prepared if prepared is not None else prepare(job)
    async with Store(stack.redis_url) as store, Outbox(stack.redis_url, folder.run_id) as outbox:
        if await store.record(folder.run_id) is None:
            await store.create(_record(job, folder))
        sinks = Sinks(job, folder, partial(_trouble, RunRecorder(folder, outbox, display, samples_kept=0)))
        status = Status(outbox, await store.observed(folder.run_id))
        context = Context(folder, store, outbox, display, status, sinks, ending or Ending())
        folder.write_summary(_summary(job, folder, "running"))
        state: RunState = "failed"
        problem = "ended by an unexpected error"
        try:
            async with beating(context.status), sinks:
                await _run(job, prepared, context, checkpoint)
            state, problem = "done", ""
        except RunStopped:
            state, problem = "stopped", "stopped by its user"
        except asyncio.CancelledError:
            state, problem = "stopped", "stopped by its user"
            raise
        except VolleyError as error:
            problem = str(error)
            raise
        except Exception as error:
            problem = f"unexpected {type(error).__name__}: {error}"
            raise
        finally:
            seconds = time.monotonic() - begun
            with contextlib.suppress(OSError):  # a full disk: Redis has it too
                folder.write_summary(_summary(job, folder, state, problem=problem, seconds=seconds, **context.facts))
            context.status.end(state, problem)
    return Result(folder, None if isinstance(job, EvalJob) or state != "done" else folder.model, seconds, state)


async def _run(job: Job, prepared: Any, context: Context, checkpoint: Path | None) -> None:
    match job:
        case RLJob():
            await rl_run.run(job, prepared, context, checkpoint)
        case SFTJob():
            await ends_when_stopped(context, sft_run.run(job, prepared, context))
        case RFTJob():
            await ends_when_stopped(context, rft_run.run(job, prepared, context))
        case EvalJob():
            await ends_when_stopped(context, eval_run.run(job, prepared, context))


async def _trouble(recorder: RunRecorder, problem: str) -> None:
    await recorder.event("trouble", problem=problem)


def _summary(job: Job, folder: RunFolder, state: str, **more: Any) -> dict[str, Any]:
    about = {"id": folder.run_id, "name": job.name, "kind": job.kind, "folder": str(folder.path)}
    return {**about, "state": state, "problem": "", **more}


def _record(job: Job, folder: RunFolder) -> RunRecord:
    return RunRecord(
        id=folder.run_id,
        name=job.name,
        kind=job.kind,
        job=job.model_dump(mode="json"),
        created=time.time(),
        folder=str(folder.path),
    )
