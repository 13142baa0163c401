"""The sampling part of an eval or rft job: start actors and reward workers, sample the prompts that are missing."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

from actors.pool import ActorPool
from services.coordinator.turns import Turns
from services.data.tokens import EncodedPrompt
from services.evaluation.estimates import Sampled
from services.evaluation.evaluate import Sampler, max_groups_in_flight
from services.evaluation.sample_log import SampleLog
from services.jobs.needs import Needs
from services.runs.context import Context, start_turn
from services.runs.episodes import episodes_of, roles_started, start_environments, start_rewards
from services.runs.role_configs import actor_config
from services.tasks import start_all
from volley.errors import HostError
from volley.job import EvalJob, RFTJob
from volley.records import Group, Prompt, Scores


async def sample_prompts(
    job: EvalJob | RFTJob,
    prompts: Sequence[EncodedPrompt],
    context: Context,
    *,
    model_length: int,
    needs: Needs,
    log: SampleLog,
    known: Mapping[str, Sampled],
    turns: Turns | None = None,
) -> list[Sampled]:
    """n samples of every prompt with their scores, in the order of the prompts. The roles have ended on return.

    Args:
        model_length: longest prompt plus sample in tokens.
        needs: what actors and reward workers reserve.
        log: gets the samples of each prompt as they are scored.
        known: the prompts that an earlier driver sampled, by id. If it holds all of them, no process is started.
    """
    folder, display = context.folder, context.display
    if known:
        display.say(f"{job.name}: {len(known)} of {len(prompts)} prompts were sampled before")
    if all(each.prompt.id in known for each in prompts):
        return [known[each.prompt.id] for each in prompts]
    display.say(f"{job.name}: starting {roles_started(job)}")
    async with contextlib.AsyncExitStack() as stack:
        async with start_turn(context, needs):
            actors, rewards, environments = await start_all(
                stack,
                ActorPool.start(actor_config(job, model_length, folder)),
                start_rewards(job, folder),
                start_environments(job, folder),
            )
        context.status.set(state="running")
        in_flight = max_groups_in_flight(job.actors, job.sampling.n)
        episodes = episodes_of(job, actors, environments, model_length)
        sampler = Sampler(actors, rewards, job.sampling, in_flight, job.seed, episodes or turns)
        with display.bar(f"{job.name} prompts", len(prompts)) as bar:
            return await sampler.sample(
                prompts, known=known, on_scored=partial(log_samples, log, context), on_group=bar.advance
            )


async def log_samples(
    log: SampleLog,
    context: Context,
    index: int,
    prompt: Prompt,
    group: Group,
    scores: Scores,
    calls_n: Sequence[int] | None,
) -> None:
    """Write what was scored of a prompt, once the disk has space; raises `HostError` if it cannot be written."""
    try:
        await context.recorder.disk.write(partial(log.write, index, prompt, group, scores, calls_n))
    except OSError as error:
        raise HostError(f"{context.folder.path}: samples cannot be written: {error.strerror or error}") from error
