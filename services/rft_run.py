"""Run a job of kind ``rft``, in two phases that never hold their processes at once.

    actors, reward workers ─> samples.jsonl ─> kept.jsonl ─> learner ─> model/

What the run folder holds is where an interrupted run goes on: prompts whose samples are there are not sampled again,
and training continues from the newest checkpoint.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from actors.pool import ActorPool
from learner.records import SFTRow
from reward_servers.pool import RewardPool
from reward_servers.scorers import check_scorer
from services.checkpoints import complete_checkpoints, steps_of
from services.context import Context, its_turn
from services.data.mixture import Order
from services.data.prompts import read_prompts
from services.estimates import Sampled
from services.eval_samples import SampleLog
from services.evaluate import groups_at_once, sample_and_score
from services.kept_samples import Kept, counts, keep
from services.needs import Needs, phases_of
from services.recorder import RunRecorder
from services.runtime_env import code_is_here
from services.start import start_all
from services.supervised import Plan, fine_tune
from services.tokens import EncodedPrompt, encode_prompts, load_tokenizer, model_length
from services.wiring import actor_config, reward_config
from volley.errors import HostError
from volley.job import RFTJob


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was read and checked before any process started."""

    prompts: list[EncodedPrompt]
    length: int


def prepare(job: RFTJob) -> Prepared:
    """Read and check data, scorer and lengths; raises `JobError` for what can not be used."""
    prompts = read_prompts(job.data, job.model.path)
    check_scorer(job.scorer, prompts, code_is_here=code_is_here(job.runtime_env))
    tokenizer, length = load_tokenizer(job.model.path), model_length(job.model.path)
    return Prepared(encode_prompts(tokenizer, prompts, room=job.sampling.max_tokens, length=length), length)


async def run(job: RFTJob, prepared: Prepared, context: Context) -> None:
    """Sample what is not sampled yet, keep, train what is not trained yet, export.

    Raises:
        JobError: no sample was correct.
        HostError: no sample could be scored.
    """
    folder = context.folder
    sampling, training = phases_of(job)
    checkpoint = next(reversed(complete_checkpoints(folder)), None)
    log = SampleLog(folder, token_ids=True)
    prompts = [each.prompt for each in prepared.prompts]
    # Once training has begun what is kept stays as it is; before, what could not be scored is tried again.
    known = await asyncio.to_thread(log.take_up, prompts, job.sampling.n, unscored=checkpoint is not None)
    if len(known) < len(prompts):
        await _sample(job, prepared, log, known, sampling, context)
    kept = await asyncio.to_thread(keep, log.rows(), prepared.prompts, most=job.keep, correct_from=job.correct_from)
    _write(kept, folder.path / "kept.jsonl")
    told = counts(kept, prompts)
    context.facts["kept"] = told
    await RunRecorder(folder, context.outbox, context.display, samples_kept=0).event("kept", **told)
    context.display.say(
        f"  kept {told['samples_kept']} of {told['samples']} samples, "
        f"of {told['prompts_kept']} of {told['prompts']} prompts"
    )
    begun = steps_of(checkpoint) if checkpoint else 0
    folder.rewind(begun, samples=False)
    context.sinks.begin(begun)
    await fine_tune(job, plan_of(job, kept), training, context, checkpoint)


def plan_of(job: RFTJob, kept: Kept) -> Plan:
    """Batches of the kept samples, each trained on token by token as it was drawn; passes end with a whole batch."""
    rows = [SFTRow(prompt_p=sample.prompt.tokens_p, answer_a=sample.tokens_a) for sample in kept.samples]
    size = max(min(job.rows_per_step, len(rows)), job.learner.ranks)  # every rank needs a row
    steps = job.steps if job.passes is None else -(-job.passes * len(rows) // size)
    if steps is None:
        raise ValueError("a job without steps has passes")
    return Plan(rows, Order(len(rows), seed=job.seed, shuffle=job.data.shuffle), steps, size)


async def _sample(
    job: RFTJob, prepared: Prepared, log: SampleLog, known: dict[str, Sampled], needs: Needs, context: Context
) -> None:
    """n samples of every prompt that is not ``known``, scored and in the log; the actors are gone afterwards."""
    folder, display = context.folder, context.display
    if known:
        display.say(f"{job.name}: {len(known)} of {len(prepared.prompts)} prompts were sampled before")
    display.say(f"{job.name}: starting {job.actors.count} actor(s), {job.reward_workers.count} reward worker(s)")
    async with contextlib.AsyncExitStack() as stack:
        async with its_turn(context, needs):
            actors, rewards = await start_all(
                stack,
                ActorPool.start(actor_config(job, prepared.length, folder)),
                RewardPool.start(reward_config(job, folder)),
            )
        context.status.set(state="running")
        with display.bar(f"{job.name} prompts", len(prepared.prompts)) as bar:
            await sample_and_score(
                prepared.prompts,
                job.sampling,
                actors=actors,
                rewards=rewards,
                at_once=groups_at_once(job.actors, job.sampling.n),
                seed=job.seed,
                on_group=bar.advance,
                on_scored=log.write,
                known=known,
            )


def _write(kept: Kept, path: Path) -> None:
    """Replace the file; raises `HostError` where the disk does not take it."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text("".join(json.dumps(sample.row()) + "\n" for sample in kept.samples))
        aside.replace(path)
    except OSError as error:
        raise HostError(f"{path} can not be written: {error.strerror or error}") from error
