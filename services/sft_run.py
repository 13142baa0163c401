"""Run a job of kind ``sft``: prompt/answer rows through the same learner."""

import contextlib
import time
from dataclasses import dataclass

from learner.group import LearnerGroup
from learner.records import SFTRow
from services.checkpoints import save_checkpoint
from services.context import Context, its_turn
from services.data.mixture import PromptOrder, order_of
from services.data.prompts import read_located
from services.needs import needs_of
from services.start import start_all
from services.tokens import encode_answers, encode_prompts, load_tokenizer, model_length
from services.wiring import sft_learner_config
from volley.job import SFTJob


@dataclass(frozen=True, slots=True)
class Prepared:
    """Encoded rows and the order they are met in."""

    rows: list[SFTRow]
    order: PromptOrder


def prepare(job: SFTJob) -> Prepared:
    """Read, check and encode every row; raises `JobError` for what can not be used."""
    located = read_located(job.data, job.model.path)
    prompts = [each.prompt for each in located]
    answers = [each.text(job.answer_field) for each in located]
    tokenizer, length = load_tokenizer(job.model.path), model_length(job.model.path)
    encoded = encode_prompts(tokenizer, prompts, room=1, length=length, key="an answer of at least")
    rows = []
    for place, each, answer_a in zip(located, encoded, encode_answers(tokenizer, answers), strict=True):
        if len(each.tokens_p) + len(answer_a) > length:
            took = len(each.tokens_p) + len(answer_a)
            raise place.row.error(f"prompt and answer take {took} tokens, over the model's length {length}")
        rows.append(SFTRow(prompt_p=each.tokens_p, answer_a=answer_a))
    return Prepared(rows, order_of(job.data, prompts, seed=job.seed))


async def run(job: SFTJob, prepared: Prepared, context: Context) -> None:
    """Every step, then the export."""
    folder, display = context.folder, context.display
    display.say(f"{job.name}: starting {job.learner.ranks} learner rank(s)")
    async with contextlib.AsyncExitStack() as stack:
        learner: LearnerGroup
        async with its_turn(context, needs_of(job)):
            (learner,) = await start_all(stack, LearnerGroup.start(sft_learner_config(job, folder)))
        context.status.set(state="running", steps=job.steps)
        with display.bar(f"{job.name} steps", job.steps) as bar:
            for step in range(job.steps):
                begun = time.monotonic()
                first = step * job.rows_per_step
                batch = [
                    prepared.rows[prepared.order[position]] for position in range(first, first + job.rows_per_step)
                ]
                report = await learner.sft_step(batch)
                row = {"step": step, "time": time.time(), **report.metrics, "seconds_step": time.monotonic() - begun}
                folder.append("metrics", [row])
                context.outbox.step(row, {})
                context.sinks.step(row)
                context.status.set(step=step + 1)
                bar.advance(f"loss {row['loss']:.3f}")
                if step + 1 == job.steps or (job.checkpoint.every and (step + 1) % job.checkpoint.every == 0):
                    await save_checkpoint(learner, folder, job.checkpoint, step + 1, {})
        await learner.export(folder.model)
    display.say(f"  model: {folder.model}")
