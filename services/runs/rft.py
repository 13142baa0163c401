"""Run a job of kind ``rft``, in two phases that never hold their processes at the same time.

    actors, reward workers ─> samples.jsonl ─> kept.jsonl ─> learner ─> model/

An interrupted run resumes from what the run folder holds: prompts whose samples are there are not sampled again, and
training continues from the newest checkpoint.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from reward_servers.scorers import check_scorer
from services.data.mixture import Order
from services.data.prompts import read_prompts
from services.data.tokens import EncodedPrompt, encode_prompts, load_tokenizer, model_length
from services.evaluation.rejection import Kept, counts, keep
from services.evaluation.sample_log import SampleLog
from services.jobs.needs import Needs, phases_of
from services.jobs.runtime_env import code_is_here
from services.recording.disk_space import DiskGuard
from services.runs.checkpoints import newest_checkpoint_or_none, steps_of
from services.runs.context import Context, run_until_stopped
from services.runs.episodes import check_program, length_of, room_of
from services.runs.sampling import sample_prompts
from services.runs.supervised import Plan, fine_tune
from volley.errors import HostError
from volley.files import replace_text
from volley.job import RFTJob


@dataclass(frozen=True, slots=True)
class RFTRun:
    """An rft job that is ready to run.

    Attributes:
        length: tokens of the job's longest prompt with the longest sample after it; with a program, of its calls.
    """

    job: RFTJob
    prompts: list[EncodedPrompt]
    length: int

    @classmethod
    def prepare(cls, job: RFTJob) -> Self:
        """Read and check data, scorer and lengths; raises `JobError` for what cannot be used."""
        prompts = read_prompts(job.data, job.model.folder)
        if job.scorer is not None:
            check_scorer(job.scorer, prompts, code_is_here=code_is_here(job.runtime_env))
        check_program(job)
        tokenizer, length = load_tokenizer(job.model.folder), model_length(job.model.folder)
        room = room_of(job, job.sampling.max_tokens)
        encoded = encode_prompts(tokenizer, prompts, **room, length=length)
        return cls(job, encoded, length_of(job, encoded, room["room"], length))

    async def run(self, context: Context) -> None:
        """Sample the prompts that are missing, keep correct samples, train the steps that are missing, and export.

        Raises:
            JobError: no sample was correct.
            HostError: no sample could be scored.
        """
        await run_until_stopped(context, self._sample_and_train(context))

    async def _sample_and_train(self, context: Context) -> None:
        folder = context.folder
        sampling, training = phases_of(self.job)
        checkpoint = newest_checkpoint_or_none(folder)
        # Once training has begun, the kept samples stay as they are; before, failed scoring is tried again.
        kept = await self._kept_samples(context, sampling, accept_unscored=checkpoint is not None)
        await _write(kept, folder.path / "kept.jsonl", context.recorder.disk)
        await self._report(kept, context)
        step = steps_of(checkpoint) if checkpoint else 0
        await context.recorder.disk.write(partial(folder.rewind, step, samples=False))
        context.sinks.begin(step)
        await fine_tune(self.job, plan_of(self.job, kept), training, context, checkpoint)

    async def _kept_samples(self, context: Context, needs: Needs, *, accept_unscored: bool) -> Kept:
        job, log = self.job, SampleLog(context.folder, token_ids=True)
        prompts = [each.prompt for each in self.prompts]
        recover = partial(asyncio.to_thread, log.recover, prompts, job.sampling.n, unscored=accept_unscored)
        known = await context.recorder.disk.retry_while_full(recover)
        if len(known) < len(prompts):
            await sample_prompts(
                job, self.prompts, context, model_length=self.length, needs=needs, log=log, known=known
            )
        return await asyncio.to_thread(
            keep, log.rows(), self.prompts, per_prompt=job.keep, correct_from=job.correct_from
        )

    async def _report(self, kept: Kept, context: Context) -> None:
        numbers: Mapping[str, object] = counts(kept, [each.prompt for each in self.prompts])
        context.summary_fields["kept"] = numbers
        await context.recorder.event("kept", **numbers)
        context.display.say(
            f"  kept {numbers['samples_kept']} of {numbers['samples']} samples, "
            f"from {numbers['prompts_kept']} of {numbers['prompts']} prompts"
        )


def plan_of(job: RFTJob, kept: Kept) -> Plan:
    """The training plan over the kept samples, whose tokens are trained on exactly as they were sampled.

    With ``passes``, the number of steps is rounded up, so that the last pass ends with a whole batch.
    """
    rows = [sample.tokens for sample in kept.samples]
    size = max(min(job.rows_per_step, len(rows)), job.learner.sequence_groups)  # each needs a row
    steps = job.steps if job.passes is None else -(-job.passes * len(rows) // size)
    if steps is None:
        raise ValueError("an rft job has steps or passes")
    return Plan(rows, Order(len(rows), seed=job.seed, shuffle=job.data.shuffle), steps, size)


async def _write(kept: Kept, path: Path, disk: DiskGuard) -> None:
    """Replace the file with the kept samples; raises `HostError` if it cannot be written."""
    text = "".join(json.dumps(sample.row()) + "\n" for sample in kept.samples)
    try:
        await disk.write(partial(replace_text, path, text))
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror or error}") from error
