"""Run a job of kind ``eval``: n samples of every prompt, and pass@k for each k."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from actors.pool import ActorPool
from reward_servers.pool import RewardPool
from reward_servers.scorers import check_scorer
from services.context import Context, its_turn
from services.data.prompts import read_prompts
from services.estimates import Evaluation, Sampled
from services.eval_samples import SampleLog
from services.evaluate import evaluate, evaluation_of, groups_at_once
from services.needs import needs_of
from services.recorder import RunRecorder
from services.runtime_env import code_is_here
from services.start import start_all
from services.tokens import EncodedPrompt, encode_prompts, load_tokenizer, model_length
from services.turns import Turns, room_for, turns_of
from services.wiring import actor_config, reward_config
from volley.job import EvalJob


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was read and checked before any process started."""

    prompts: list[EncodedPrompt]
    length: int
    turns: Turns | None


def prepare(job: EvalJob) -> Prepared:
    """Read and check data, scorer and lengths; raises `JobError` for what can not be used."""
    prompts = read_prompts(job.data, job.model.path)[: job.prompts]
    check_scorer(job.scorer, prompts, code_is_here=code_is_here(job.runtime_env))
    tokenizer, length = load_tokenizer(job.model.path), model_length(job.model.path)
    encoded = encode_prompts(tokenizer, prompts, **room_for(job.sampling.max_tokens, job.turns), length=length)
    return Prepared(encoded, length, turns_of(job.turns, tokenizer))


async def run(job: EvalJob, prepared: Prepared, context: Context) -> None:
    """One evaluation of the job's model, which is version 0.

    Every sample goes to ``samples.jsonl``. Prompts whose samples an interrupted run left there are not sampled again;
    where none is left to sample no process is started. The folder holds one evaluation, however often it is resumed.
    """
    folder, display = context.folder, context.display
    log, prompts = SampleLog(folder), [each.prompt for each in prepared.prompts]
    known = await asyncio.to_thread(log.take_up, prompts, job.sampling.n)
    if known:
        display.say(f"{job.name}: {len(known)} of {len(prompts)} prompts were sampled before")
    if len(known) == len(prompts):
        sampled = [known[prompt.id] for prompt in prompts]
        evaluation = evaluation_of(prompts, sampled, job.ks, version=0, seed=job.seed)
    else:
        evaluation = await _sampled(job, prepared, log, known, context)
    (folder.path / "evaluations.jsonl").unlink(missing_ok=True)  # that of a life before: the same, or cut short
    await RunRecorder(folder, context.outbox, display, samples_kept=0, sinks=context.sinks).evaluation(evaluation)
    from services import plots  # here, since importing matplotlib takes a second

    plots.pass_at_k({job.name: evaluation.row()}, folder.plots / "pass_at_k.png")


async def _sampled(
    job: EvalJob, prepared: Prepared, log: SampleLog, known: Mapping[str, Sampled], context: Context
) -> Evaluation:
    """The evaluation, after n samples of every prompt that is not ``known``."""
    folder, display = context.folder, context.display
    display.say(f"{job.name}: starting {job.actors.count} actor(s), {job.reward_workers.count} reward worker(s)")
    async with contextlib.AsyncExitStack() as stack:
        async with its_turn(context, needs_of(job)):
            actors, rewards = await start_all(
                stack,
                ActorPool.start(actor_config(job, prepared.length, folder)),
                RewardPool.start(reward_config(job, folder)),
            )
        context.status.set(state="running")
        with display.bar(f"{job.name} prompts", len(prepared.prompts)) as bar:
            return await evaluate(
                prepared.prompts,
                job.sampling,
                job.ks,
                actors=actors,
                rewards=rewards,
                at_once=groups_at_once(job.actors, job.sampling.n),
                seed=job.seed,
                on_group=bar.advance,
                on_scored=log.write,
                known=known,
                turns=prepared.turns,
            )
