"""Run a job: check everything that can be checked first, start the roles, run, and leave a complete run folder."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reward_servers.scorers import import_functions, names_plugin
from services.control.heartbeat import Status
from services.data.tokens import import_tokenizers_alone
from services.jobs.adapters import check_adapters
from services.jobs.job_file import Job
from services.jobs.machine import bfloat16_notice
from services.jobs.needs import check_host, needs_of
from services.jobs.runtime_env import for_ray, make_importable
from services.notifications.local import check_keys, notifying
from services.recording.display import Display
from services.recording.recorder import RunRecorder
from services.recording.sinks.sinks import Sinks, check_sinks
from services.runs.context import Context, Run, heartbeats
from services.runs.episodes import import_program
from services.runs.eval import EvalRun
from services.runs.rft import RFTRun
from services.runs.rl import RLRun
from services.runs.sft import SFTRun
from services.runs.trial import chat_notice
from services.signals import StopSignal
from services.stack.ephemeral import Stack, local_stack
from services.store.folder import RunFolder
from services.store.outbox import Outbox
from services.store.redis import Store
from volley.errors import RunStopped, VolleyError
from volley.job import EvalJob, RFTJob, RLJob, SFTJob
from volley.state import RunRecord, RunState


@dataclass(frozen=True, slots=True)
class Result:
    """What a run left behind.

    Attributes:
        folder: its run folder.
        model: the exported Hugging Face model; None for an evaluation, and for a run that was stopped.
        seconds: wall time, start-up included.
        state: how it ended.
    """

    folder: RunFolder
    model: Path | None
    seconds: float
    state: RunState


def prepare(job: Job) -> Run:
    """Read and check everything that ``job`` names before any process starts.

    Raises:
        JobError: the data, the model, its adapters, the scorer or a sink cannot be used.
    """
    check_sinks(job.sinks)
    make_importable(job.runtime_env)
    run: Run
    match job:
        case RLJob():
            run = RLRun.prepare(job)
        case SFTJob():
            run = SFTRun.prepare(job)
        case RFTJob():
            run = RFTRun.prepare(job)
        case EvalJob():
            run = EvalRun.prepare(job)
    check_adapters(job.model)
    return run


def prepare_alone(job: Job) -> Run:
    """Like `prepare`, but faster because it does not import torch: for processes that load no model themselves.

    Only the tokenizers of transformers are imported. The user's own functions are imported first: if one imports
    transformers, the process gets all of it. Plug-ins may import it later.
    """
    if isinstance(job, SFTJob):
        import_tokenizers_alone()
    elif job.scorer is None or not names_plugin(job.scorer):
        make_importable(job.runtime_env)
        if job.scorer is not None:
            import_functions(job.scorer)
        import_program(job)
        import_tokenizers_alone()
    return prepare(job)


def prepare_here(job: Job) -> Run:
    """Like `prepare_alone`, for a run in this process: it sends the notifications too, so it needs their keys."""
    check_keys(job.notify)
    return prepare_alone(job)


async def run_alone(
    run: Run,
    folder: RunFolder,
    display: Display,
    *,
    checkpoint: Path | None = None,
    redis_url: str | None = None,
    ray_address: str | None = None,
    stop_signal: StopSignal | None = None,
) -> Result:
    """Start a stack for the run, run on it, and stop it afterwards. Servers whose address is given are used instead.

    Raises:
        HostError: this machine lacks memory, disk space or a server for the run.
        Whatever `run_on` raises.
    """
    job = run.job
    with folder.in_use():
        folder.write_summary({"state": "starting", "problem": ""})
        try:
            needs = needs_of(job)
            check_host(needs, folder.path)
            if servers := " and ".join(name for name, url in (("Redis", redis_url), ("Ray", ray_address)) if not url):
                display.say(f"starting {servers}")
            async with (
                local_stack(
                    needs,
                    folder.logs,
                    redis_url=redis_url,
                    ray_address=ray_address,
                    runtime_env=for_ray(job.runtime_env),
                ) as stack,
                notifying(job.notify, folder, stack.redis_url, display.say),
            ):
                return await run_on(stack, run, folder, display, checkpoint=checkpoint, stop_signal=stop_signal)
        except (VolleyError, asyncio.CancelledError) as error:
            if folder.summary()["state"] == "starting":
                state, problem = _outcome(error)
                folder.write_summary({"state": state, "problem": problem})
            raise


async def run_on(
    stack: Stack,
    run: Run,
    folder: RunFolder,
    display: Display,
    *,
    checkpoint: Path | None = None,
    stop_signal: StopSignal | None = None,
    signalled: RunState = "stopped",
) -> Result:
    """Run on a stack that is up. Whatever happens, the run's summary and its observed state say how it ended.

    Args:
        checkpoint: where an rl run resumes; see `Context`.
        stop_signal: how a signal ends the run; None means that cancelling this coroutine does.
        signalled: the state to report after a signal; a run that goes on with another driver has not ended.

    Raises:
        VolleyError: the run failed.
        CancelledError: a signal stopped it. A run that its user stopped returns normally, with state ``stopped``.
    """
    begun = time.monotonic()
    async with Store(stack.redis_url) as store, Outbox(stack.redis_url, folder.run_id) as outbox:
        if await store.record(folder.run_id) is None:
            await store.create(_record(run.job, folder))
        status = Status(outbox, await store.observed(folder.run_id), folder)
        recorder = RunRecorder(folder, outbox, display, samples_kept=0, on_full=status.pause)
        recorder.sinks = sinks = Sinks(run.job, folder, partial(_report_trouble, recorder))
        stop_signal = stop_signal or StopSignal()
        context = Context(folder, store, outbox, display, status, sinks, recorder, checkpoint, stop_signal)
        for notice in (chat_notice(run.job), bfloat16_notice(run.job)):
            if notice:
                display.say(f"note: {notice}")
        ended_by: BaseException | None = None
        try:
            async with heartbeats(status, display), sinks:
                await recorder.disk.write(partial(folder.write_summary, _summary(run.job, folder, "running")))
                await run.run(context)
        except RunStopped as stop:
            ended_by = stop
        except BaseException as error:
            ended_by = error
            raise
        finally:
            state, problem = _outcome(ended_by)
            seconds = time.monotonic() - begun
            fields = {"problem": problem, "seconds": seconds, **context.summary_fields}
            with contextlib.suppress(OSError):  # if the disk is full, Redis still has it
                folder.write_summary(_summary(run.job, folder, state, **fields))
            status.end(signalled if isinstance(ended_by, asyncio.CancelledError) else state, problem)
    model = folder.model if state == "done" and not isinstance(run.job, EvalJob) else None
    return Result(folder, model, seconds, state)


def _outcome(error: BaseException | None) -> tuple[RunState, str]:
    """The final state of a run and the problem to report, given what ended it."""
    match error:
        case None:
            return "done", ""
        case RunStopped() | asyncio.CancelledError():
            return "stopped", "stopped by its user"
        case VolleyError():
            return "failed", str(error)
        case Exception():
            return "failed", f"unexpected {type(error).__name__}: {error}"
        case _:
            return "failed", "ended by an unexpected error"


async def _report_trouble(recorder: RunRecorder, problem: str) -> None:
    await recorder.event("trouble", problem=problem)


def _summary(job: Job, folder: RunFolder, state: str, **fields: object) -> dict[str, object]:
    about = {"id": folder.run_id, "name": job.name, "kind": job.kind, "folder": str(folder.path)}
    return {**about, "state": state, "problem": "", **fields}


def _record(job: Job, folder: RunFolder) -> RunRecord:
    return RunRecord(
        id=folder.run_id,
        name=job.name,
        kind=job.kind,
        job=job.model_dump(mode="json"),
        created=time.time(),
        folder=str(folder.path),
    )
