"""Evaluation: n samples of every prompt, scored. `services.estimates` makes figures of them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from actors.config import GenerateRequest
from services.estimates import Evaluation, Sampled, summarise
from services.fetch import fetched
from services.roles import Generator, Judge
from services.start import first_error
from services.tokens import EncodedPrompt
from services.turns import Turns, make_group
from volley.errors import HostError
from volley.job import ActorsSpec, EvalSampling
from volley.records import Group, Prompt, Scores

OnScored = Callable[[int, Prompt, Group, Scores], None]


def groups_at_once(actors: ActorsSpec, n: int) -> int:
    """Groups in flight that keep every engine's batch full, with one waiting."""
    return actors.count * (-(-actors.max_num_seqs // n) + 1)


async def evaluate(
    prompts: Sequence[EncodedPrompt],
    sampling: EvalSampling,
    ks: Sequence[int],
    *,
    actors: Generator,
    rewards: Judge,
    at_once: int,
    seed: int,
    on_group: Callable[[], None],
    on_scored: OnScored | None = None,
    known: Mapping[str, Sampled] | None = None,
    turns: Turns | None = None,
) -> Evaluation:
    """Sample and score every prompt under the weights the actors serve, and estimate.

    Args:
        ks: of the estimates; the other arguments are those of `sample_and_score`.

    Raises:
        HostError: as `evaluation_of`.
    """
    version = actors.version
    sampled = await sample_and_score(
        prompts,
        sampling,
        actors=actors,
        rewards=rewards,
        at_once=at_once,
        seed=seed,
        on_group=on_group,
        on_scored=on_scored,
        known=known,
        turns=turns,
    )
    return evaluation_of([each.prompt for each in prompts], sampled, ks, version=version, seed=seed)


def evaluation_of(
    prompts: Sequence[Prompt], sampled: Sequence[Sampled], ks: Sequence[int], *, version: int, seed: int
) -> Evaluation:
    """The figures of what was sampled and scored.

    Raises:
        HostError: a sample could not be scored; an evaluation with holes would mislead.
    """
    _check_scored([each.scores for each in sampled])
    return summarise(prompts, sampled, ks, version=version, seed=seed)


async def sample_and_score(
    prompts: Sequence[EncodedPrompt],
    sampling: EvalSampling,
    *,
    actors: Generator,
    rewards: Judge,
    at_once: int,
    seed: int,
    on_group: Callable[[], None],
    on_scored: OnScored | None = None,
    known: Mapping[str, Sampled] | None = None,
    turns: Turns | None = None,
) -> list[Sampled]:
    """n samples of every prompt with their scores, in the order of the prompts.

    Args:
        at_once: groups in flight.
        seed: of the bootstrap, and of the samples where ``sampling.seeded``.
        on_group: called after each group, for progress displays.
        on_scored: told of each group with its samples, as it is scored.
        known: prompts that are done, by id: these are not sampled again.
        turns: what samples that fail are shown, where there is more than one turn.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(index: int, encoded: EncodedPrompt) -> Sampled:
        if known and encoded.prompt.id in known:
            on_group()
            return known[encoded.prompt.id]
        async with gate:
            made = await make_group(
                GenerateRequest(
                    group_id=-1 - index,  # outside the run's own numbering
                    prompt_id=encoded.prompt.id,
                    prompt_p=encoded.tokens_p,
                    n=sampling.n,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=sampling.max_tokens,
                    seed=(seed * 1_000_003 + index) % 2**63 if sampling.seeded else None,
                ),
                encoded.prompt,
                actors=actors,
                rewards=rewards,
                turns=turns,
            )
            if on_scored is not None:
                on_scored(index, encoded.prompt, await fetched(made.group), made.scores)
            on_group()
            return Sampled(made.scores, made.meta.sample_tokens, made.meta.logprob_sum)

    try:
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(one(index, encoded)) for index, encoded in enumerate(prompts)]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return [task.result() for task in pending]


def _check_scored(scored: Sequence[Scores]) -> None:
    unscored = [verdict.detail for scores in scored for verdict in scores.verdicts if verdict.reward is None]
    if unscored:
        prompts = sum(bool(np.isnan(scores.rewards_n).any()) for scores in scored)
        raise HostError(
            f"evaluation: samples of {prompts} prompts could not be scored: {unscored[0] or 'no reason given'}"
        )
