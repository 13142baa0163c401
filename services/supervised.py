"""The supervised part of a job, of kind ``sft`` or ``rft``: start the learner, train on rows, export the model."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.group import LearnerGroup
from learner.records import SFTRow
from services.checkpoints import save_checkpoint, steps_of
from services.context import Context, its_turn
from services.data.mixture import PromptOrder
from services.display import Bar
from services.needs import Needs
from services.start import start_all
from services.wiring import supervised_learner_config
from volley.job import RFTJob, SFTJob


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained on: ``steps`` batches of ``rows_per_step`` rows, in their order."""

    rows: Sequence[SFTRow]
    order: PromptOrder
    steps: int
    rows_per_step: int

    def batch(self, step: int) -> list[SFTRow]:
        """The rows of one step, numbered from 0."""
        first = step * self.rows_per_step
        return [self.rows[self.order[position]] for position in range(first, first + self.rows_per_step)]


async def fine_tune(
    job: SFTJob | RFTJob, plan: Plan, needs: Needs, context: Context, checkpoint: Path | None = None
) -> None:
    """Every step of the plan, or those after ``checkpoint``, then the export.

    Args:
        needs: what the learner reserves.

    Raises:
        RunStopped: its user stopped it, while it waited for room or at a checkpoint.
        CancelledError: a signal did, at a checkpoint.
    """
    folder, display = context.folder, context.display
    display.say(f"{job.name}: starting {job.learner.ranks} learner rank(s)")
    async with contextlib.AsyncExitStack() as stack:
        learner: LearnerGroup
        async with its_turn(context, needs):
            config = supervised_learner_config(job, plan.steps, folder)
            (learner,) = await start_all(stack, LearnerGroup.start(config))
        first = 0
        if checkpoint is not None:
            await learner.load(checkpoint)
            first = steps_of(checkpoint)
        context.status.set(state="running", step=first, steps=plan.steps)
        with display.bar(f"{job.name} steps", plan.steps) as bar, context.ending.held(job.checkpoint.grace_s):
            bar.go_to(first)
            for step in range(first, plan.steps):
                await _step(job, plan, step, learner, context, bar)
                if context.ending.wanted.is_set() and step + 1 < plan.steps:
                    raise context.left()
        await learner.export(folder.model)
    display.say(f"  model: {folder.model}")


async def _step(job: SFTJob | RFTJob, plan: Plan, step: int, learner: LearnerGroup, context: Context, bar: Bar) -> None:
    """One step, told to all who listen; a checkpoint where one is due."""
    begun = time.monotonic()
    report = await learner.sft_step(plan.batch(step))
    row = {"step": step, "time": time.time(), **report.metrics, "seconds_step": time.monotonic() - begun}
    context.folder.append("metrics", [row])
    context.outbox.step(row, {})
    context.sinks.step(row)
    done = step + 1
    context.status.set(step=done)
    bar.advance(f"loss {row['loss']:.3f}")
    due = job.checkpoint.every is not None and done % job.checkpoint.every == 0
    if due or done == plan.steps or context.ending.wanted.is_set():
        await save_checkpoint(learner, context.folder, job.checkpoint, done, {})
        context.status.set(checkpoint=done, checkpointed=time.time())
