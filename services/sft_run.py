"""Run a job of kind ``sft``: prompt/answer rows through the same learner."""

from dataclasses import dataclass

from learner.records import SFTRow
from services.checkpoints import complete_checkpoints, steps_of
from services.context import Context
from services.data.mixture import PromptOrder, order_of
from services.data.prompts import read_located
from services.needs import needs_of
from services.supervised import Plan, fine_tune
from services.tokens import encode_answers, encode_prompts, load_tokenizer, model_length
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
    """Every step, or those after the newest checkpoint in the folder; then the export."""
    plan = Plan(prepared.rows, prepared.order, job.steps, job.rows_per_step)
    checkpoint = next(reversed(complete_checkpoints(context.folder)), None)
    begun = steps_of(checkpoint) if checkpoint else 0
    context.folder.rewind(begun)
    context.sinks.begin(begun)
    await fine_tune(job, plan, needs_of(job), context, checkpoint)
