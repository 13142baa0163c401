"""Run a job of kind ``sft``: train on prompt/answer rows, with the learner that rl jobs use."""

from dataclasses import dataclass
from functools import partial
from typing import Self

from learner.records import SFTRow
from services.data.mixture import PromptOrder, order_of
from services.data.prompts import read_located
from services.data.tokens import encode_answers, encode_prompts, load_tokenizer, model_length
from services.jobs.needs import needs_of
from services.runs.checkpoints import newest_checkpoint_or_none, steps_of
from services.runs.context import Context, run_until_stopped
from services.runs.supervised import Plan, fine_tune
from volley.job import SFTJob


@dataclass(frozen=True, slots=True)
class SFTRun:
    """An sft job that is ready to run: its encoded rows, and the order in which they are trained on."""

    job: SFTJob
    rows: list[SFTRow]
    order: PromptOrder

    @classmethod
    def prepare(cls, job: SFTJob) -> Self:
        """Read, check and encode every row; raises `JobError` for what cannot be used."""
        located = read_located(job.data, job.model.folder)
        prompts = [each.prompt for each in located]
        answers = [each.text(job.answer_field) for each in located]
        tokenizer, length = load_tokenizer(job.model.folder), model_length(job.model.folder)
        encoded = encode_prompts(tokenizer, prompts, room=1, length=length, key="an answer of at least")
        rows = []
        for place, each, answer_a in zip(located, encoded, encode_answers(tokenizer, answers), strict=True):
            tokens = len(each.tokens_p) + len(answer_a)
            if tokens > length:
                raise place.row.error(
                    f"prompt and answer take {tokens} tokens, over the model's length {length}: shorten or remove the "
                    "row, or leave long rows out with data.filters"
                )
            rows.append(SFTRow(prompt_p=each.tokens_p, answer_a=answer_a))
        return cls(job, rows, order_of(job.data, prompts, seed=job.seed))

    async def run(self, context: Context) -> None:
        """Train every step, or those after the newest checkpoint in the run folder, then export the model."""
        await run_until_stopped(context, self._train(context))

    async def _train(self, context: Context) -> None:
        plan = Plan(self.rows, self.order, self.job.steps, self.job.rows_per_step)
        checkpoint = newest_checkpoint_or_none(context.folder)
        step = steps_of(checkpoint) if checkpoint else 0
        await context.recorder.disk.write(partial(context.folder.rewind, step))
        context.sinks.begin(step)
        await fine_tune(self.job, plan, needs_of(self.job), context, checkpoint)
