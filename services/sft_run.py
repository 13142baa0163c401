"""Run a job of kind ``sft``: prompt/answer rows through the same learner."""

import contextlib
import time

from learner.group import LearnerGroup
from learner.records import SFTRow
from services.checkpoints import save_checkpoint
from services.dataset import Order, read_rows, text_field
from services.display import Display
from services.run_folder import RunFolder
from services.start import start_all
from services.store import RunStore
from services.tokens import encode_answers, encode_prompts, load_tokenizer, model_length
from services.wiring import sft_learner_config
from volley.errors import DataError
from volley.job import SFTJob
from volley.records import Prompt


def prepare(job: SFTJob) -> list[SFTRow]:
    """Read, check and encode every row; raises `JobError` for what can not be used."""
    prompts, answers, lines = [], [], []
    for number, row in read_rows(job.data.path):
        prompts.append(
            Prompt(f"{job.data.path.stem}:{number}", text_field(job.data.path, number, row, job.data.prompt_field))
        )
        answers.append(text_field(job.data.path, number, row, job.answer_field))
        lines.append(number)
    if not prompts:
        raise DataError(job.data.path, 1, "the file has no rows")
    tokenizer, length = load_tokenizer(job.model.path), model_length(job.model.path)
    encoded = encode_prompts(tokenizer, prompts, room=1, length=length, key="an answer of at least")
    rows = []
    for number, each, answer_a in zip(lines, encoded, encode_answers(tokenizer, answers), strict=True):
        if len(each.tokens_p) + len(answer_a) > length:
            raise DataError(
                job.data.path,
                number,
                f"prompt and answer take {len(each.tokens_p) + len(answer_a)} tokens, over the model's length {length}",
            )
        rows.append(SFTRow(prompt_p=each.tokens_p, answer_a=answer_a))
    return rows


async def run(job: SFTJob, rows: list[SFTRow], folder: RunFolder, store: RunStore, display: Display) -> None:
    """Every step, then the export."""
    display.say(f"{job.name}: starting {job.learner.ranks} learner rank(s)")
    order = Order(len(rows), seed=job.seed, shuffle=job.data.shuffle)
    async with contextlib.AsyncExitStack() as stack:
        learner: LearnerGroup
        (learner,) = await start_all(stack, LearnerGroup.start(sft_learner_config(job, folder)))
        with display.bar(f"{job.name} steps", job.steps) as bar:
            for step in range(job.steps):
                begun = time.monotonic()
                first = step * job.rows_per_step
                batch = [rows[order[position]] for position in range(first, first + job.rows_per_step)]
                report = await learner.sft_step(batch)
                row = {"step": step, "time": time.time(), **report.metrics, "seconds_step": time.monotonic() - begun}
                folder.append("metrics", [row])
                await store.add_step(row, {})
                bar.advance(f"loss {row['loss']:.3f}")
                if step + 1 == job.steps or (job.checkpoint.every and (step + 1) % job.checkpoint.every == 0):
                    await save_checkpoint(learner, folder, job.checkpoint.keep, step + 1, {})
        await learner.export(folder.model)
    display.say(f"  model: {folder.model}")
