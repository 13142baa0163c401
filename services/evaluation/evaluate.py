"""Evaluation: n samples of every prompt, scored. `services.evaluation.estimates` computes the figures."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from actors.config import GenerateRequest
from services.coordinator.episodes import Episodes, make_samples
from services.coordinator.roles import Actors, RewardWorkers
from services.coordinator.schedule import group_seed
from services.coordinator.scoring_health import broken_function, is_one_mistake, mistakes_of
from services.coordinator.turns import Turns
from services.data.tokens import EncodedPrompt
from services.evaluation.estimates import Sampled
from services.evaluation.fetch import fetched
from services.tasks import first_error
from volley.errors import HostError
from volley.job import ActorsSpec
from volley.records import Group, Prompt, Scores
from volley.sampling import EvalSampling

_EVALUATION = 1  # sets its seeds apart from those of the groups to train on

OnScored = Callable[[int, Prompt, Group, Scores, Sequence[int] | None], Awaitable[None]]


def max_groups_in_flight(actors: ActorsSpec, n: int) -> int:
    """How many groups keep every engine's batch full, with one more waiting per engine."""
    return actors.count * (-(-actors.max_num_seqs // n) + 1)


def unscored_problem(sampled: Sequence[Sampled]) -> str:
    """What to report of samples that could not be scored, which an evaluation leaves out; "" if all were scored.

    Raises:
        HostError: none could be scored, so there is nothing to estimate from.
        JobError: none could be scored, because the user's function is broken.
    """
    verdicts = [verdict for each in sampled for verdict in each.scores.verdicts]
    unscored = [verdict.detail for verdict in verdicts if verdict.reward is None]
    if not unscored:
        return ""
    reason = f"the first because: {unscored[0] or 'no reason given'}"
    if len(unscored) == len(verdicts):
        if is_one_mistake(set[str]().union(*(mistakes_of(each.scores) for each in sampled))):
            raise broken_function(f"the evaluation's {len(sampled)} prompts", unscored[0])
        raise HostError(f"none of the {len(verdicts)} samples of an evaluation could be scored, {reason}")
    return f"{len(unscored)} of {len(verdicts)} samples could not be scored and are left out, {reason}"


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws and scores n samples per prompt, under the weights that the actors serve.

    Attributes:
        max_in_flight: groups that are generated or scored at the same time.
        seed: makes the samples reproducible if ``sampling.seeded``.
        turns: how samples are made in several turns, or by programs; None if one call makes each.
    """

    actors: Actors
    rewards: RewardWorkers
    sampling: EvalSampling
    max_in_flight: int
    seed: int
    turns: Turns | Episodes | None = None

    async def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        *,
        known: Mapping[str, Sampled] | None = None,
        on_scored: OnScored | None = None,
        on_group: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        """The scored samples of every prompt, in the order of the prompts.

        Args:
            known: prompts that need not be sampled again, by id.
            on_scored: called after scoring with the prompt's position, the prompt, its group, the scores, and how many
                calls each episode made, or None if no program made them.
            on_group: called once per prompt, for progress displays.
        """
        known = known or {}
        free = asyncio.Semaphore(self.max_in_flight)

        async def sampled(index: int, encoded: EncodedPrompt) -> Sampled:
            found = known.get(encoded.prompt.id)
            if found is None:
                async with free:
                    found = await self._sample_one(index, encoded, on_scored)
            if on_group is not None:
                on_group()
            return found

        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(sampled(index, encoded)) for index, encoded in enumerate(prompts)]
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        return [task.result() for task in pending]

    async def _sample_one(self, index: int, encoded: EncodedPrompt, on_scored: OnScored | None) -> Sampled:
        made = await make_samples(
            self._request(index, encoded),
            encoded.prompt,
            actors=self.actors,
            rewards=self.rewards,
            turns=self.turns,
        )
        calls_n = None if made.episodes is None else [report.calls for report in made.episodes.reports]
        if on_scored is not None:
            await on_scored(index, encoded.prompt, await fetched(made.group), made.scores, calls_n)
        calls = None if calls_n is None else sum(calls_n)
        return Sampled(made.scores, made.meta.sample_tokens, made.meta.logprob_sum, calls)

    def _request(self, index: int, encoded: EncodedPrompt) -> GenerateRequest:
        sampling = self.sampling
        return GenerateRequest(
            group_id=-1 - index,  # groups to train on are numbered from 0
            prompt_id=encoded.prompt.id,
            prompt_p=encoded.tokens_p,
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=group_seed(self.seed, index, _EVALUATION) if sampling.seeded else None,
        )
