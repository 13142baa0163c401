"""Run a job of kind ``eval``: n samples of every prompt, and pass@k for each k."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Self

from reward_servers.scorers import check_scorer
from services.coordinator.turns import Turns, turns_of
from services.data.prompts import read_prompts
from services.data.tokens import EncodedPrompt, encode_prompts, load_tokenizer, model_length
from services.evaluation.estimates import summarise
from services.evaluation.evaluate import unscored_problem
from services.evaluation.sample_log import SampleLog
from services.jobs.needs import needs_of
from services.jobs.runtime_env import code_is_here
from services.runs.context import Context, run_until_stopped
from services.runs.episodes import check_program, length_of, room_of
from services.runs.sampling import sample_prompts
from volley.job import EvalJob
from volley.objectives.tries import terms_of


@dataclass(frozen=True, slots=True)
class EvalRun:
    """An eval job that is ready to run.

    Attributes:
        length: tokens of the job's longest prompt with the longest sample after it; with a program, of its calls.
        turns: None if the job has one turn.
    """

    job: EvalJob
    prompts: list[EncodedPrompt]
    length: int
    turns: Turns | None

    @classmethod
    def prepare(cls, job: EvalJob) -> Self:
        """Read and check data, scorer and lengths; raises `JobError` for what cannot be used."""
        prompts = read_prompts(job.data, job.model.folder)[: job.prompts]
        if job.scorer is not None:
            check_scorer(job.scorer, prompts, code_is_here=code_is_here(job.runtime_env))
        check_program(job)
        tokenizer, length = load_tokenizer(job.model.folder), model_length(job.model.folder)
        room = room_of(job, job.sampling.max_tokens)
        encoded = encode_prompts(tokenizer, prompts, **room, length=length)
        return cls(job, encoded, length_of(job, encoded, room["room"], length), turns_of(job.turns, tokenizer))

    async def run(self, context: Context) -> None:
        """Evaluate the job's model.

        Every sample goes to ``samples.jsonl``. Prompts that an interrupted driver sampled there are not sampled again;
        if all of them were, no process is started. The folder holds one evaluation, however often it is resumed.

        Raises:
            HostError: no sample could be scored.
        """
        await run_until_stopped(context, self._evaluate(context))

    async def _evaluate(self, context: Context) -> None:
        job, folder = self.job, context.folder
        log, prompts = SampleLog(folder), [each.prompt for each in self.prompts]
        recover = partial(asyncio.to_thread, log.recover, prompts, job.sampling.n)
        known = await context.recorder.disk.retry_while_full(recover)
        sampled = await sample_prompts(
            job,
            self.prompts,
            context,
            model_length=self.length,
            needs=needs_of(job),
            log=log,
            known=known,
            turns=self.turns,
        )
        problem = unscored_problem(sampled)
        terms = terms_of(None, job.weights, None)
        evaluation = summarise(prompts, sampled, job.ks, terms=terms, version=job.version, seed=job.seed)
        (folder.path / "evaluations.jsonl").unlink(
            missing_ok=True
        )  # an earlier driver's evaluation: the same, or incomplete
        if problem:
            await context.recorder.event("trouble", problem=problem)
        await context.recorder.evaluation(evaluation)
        from services.recording import plots  # imported here because matplotlib takes a second

        draw = partial(plots.pass_at_k, {job.name: evaluation.row()}, folder.plots / "pass_at_k.png")
        await context.recorder.disk.write(draw)
