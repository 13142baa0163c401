"""The training part of an sft or rft job: start the learner, train on rows, export the model."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from learner.pool import LearnerPool
from learner.records import SFTRow
from services.data.mixture import PromptOrder
from services.jobs.needs import Needs
from services.recording.display import Bar
from services.runs.checkpoints import CheckpointWriter, steps_of
from services.runs.context import Context, start_turn
from services.runs.role_configs import supervised_learner_config
from services.tasks import cancel_all, start_all
from volley.job import CheckpointSpec, RFTJob, SFTJob

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train on: ``steps`` batches of ``rows_per_step`` rows, taken in ``order``."""

    rows: Sequence[SFTRow]
    order: PromptOrder
    steps: int
    rows_per_step: int

    def batch(self, step: int) -> list[SFTRow]:
        """The rows of one step, which are numbered from 0."""
        first = step * self.rows_per_step
        return [self.rows[self.order[position]] for position in range(first, first + self.rows_per_step)]


async def fine_tune(
    job: SFTJob | RFTJob, plan: Plan, needs: Needs, context: Context, checkpoint: Path | None = None
) -> None:
    """Train every step of the plan, or those after ``checkpoint``, then export the model.

    Args:
        needs: what the learner reserves.

    Raises:
        RunStopped: the user stopped the run, while it waited for resources or at a checkpoint.
        CancelledError: a signal stopped it at a checkpoint.
    """
    folder, display = context.folder, context.display
    display.say(f"{job.name}: starting {job.learner.ranks} learner rank(s)")
    async with contextlib.AsyncExitStack() as stack:
        async with start_turn(context, needs):
            config = supervised_learner_config(job, plan.steps, folder)
            (learner,) = await start_all(stack, LearnerPool.start(config))
        first = 0
        if checkpoint is not None:
            await learner.load(checkpoint)
            first = steps_of(checkpoint)
        context.status.set(state="running", step=first, steps=plan.steps)
        stop_signal, saver = context.stop_signal, _Saver(learner, context, job.checkpoint)
        await stack.enter_async_context(saver)
        with display.bar(f"{job.name} steps", plan.steps) as bar, stop_signal.grace_period(job.checkpoint.grace_s):
            bar.go_to(first)
            for step in range(first, plan.steps):
                await _step(job, plan, step, learner, context, bar, saver)
                if stop_signal.requested.is_set() and step + 1 < plan.steps:
                    await saver.stored()
                    raise context.stop_exception()
            await saver.stored()
        await context.recorder.disk.retry_while_full(partial(learner.export, folder.model))
    from services.recording import plots  # imported here because matplotlib takes a second

    await context.recorder.disk.write(partial(plots.loss_curves, folder))
    display.say(f"  model: {folder.model}")


async def _step(
    job: SFTJob | RFTJob, plan: Plan, step: int, learner: LearnerPool, context: Context, bar: Bar, saver: "_Saver"
) -> None:
    """Train one step, record it, and begin a checkpoint if one is due."""
    begun = time.monotonic()
    report = await learner.sft_step(plan.batch(step))
    saver.check()
    row = {"step": step, "time": time.time(), **report.metrics, "seconds_step": time.monotonic() - begun}
    await context.recorder.supervised_step(row)
    done = step + 1
    context.status.set(step=done)
    bar.advance(f"loss {row['loss']:.3f}")
    due = job.checkpoint.every is not None and done % job.checkpoint.every == 0
    if due or done == plan.steps or context.stop_signal.requested.is_set():
        await saver.begin(done)


class _Saver:
    """Writes checkpoints while the learner takes its next steps."""

    def __init__(self, learner: LearnerPool, context: Context, spec: CheckpointSpec) -> None:
        self._learner, self._context, self._disk = learner, context, context.recorder.disk
        self._writer = CheckpointWriter(context.folder, spec)
        self._storing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Store a checkpoint that was begun, unless the run is cancelled or has failed and cannot store it now."""
        if self._storing is None:
            return
        cancelled, failed = kind is not None and not issubclass(kind, Exception), kind is not None
        if cancelled or self._learner.failure is not None or (failed and self._disk.problem):
            await cancel_all([self._storing])
        await asyncio.wait([self._storing])
        if not self._storing.cancelled() and (problem := self._storing.exception()) is not None and kind is not None:
            log.warning("the last checkpoint is lost: %s", problem)

    async def begin(self, done: int) -> None:
        await self.stored()
        await self._disk.retry_while_full(partial(self._writer.begin, self._learner, done, {}))
        self._storing = asyncio.create_task(self._store(done))

    async def stored(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self._storing is not None:
            await self._storing

    def check(self) -> None:
        """Raise why the last checkpoint could not be stored, if that is known."""
        if self._storing is not None and self._storing.done():
            self._storing.result()

    async def _store(self, done: int) -> None:
        await self._disk.retry_while_full(partial(self._writer.stored, self._learner))
        self._context.status.set(checkpoint=done, checkpointed=time.time())
