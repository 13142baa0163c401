"""Evaluation: n samples of every prompt, and the unbiased estimates of max@k and maj@k for each k, by tag too."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.config import GenerateRequest
from services.roles import Generator, Judge
from services.start import first_error
from services.tokens import EncodedPrompt
from volley.errors import HostError
from volley.job import ActorsSpec, EvalSampling
from volley.objectives import bootstrap_interval, maj_at_k, max_at_k
from volley.records import Group, Prompt, Scores

LEVEL = 0.95
MAX_VALUES = 64  # of a tag; one with more, such as an id, is no breakdown
GROUP_S = 60.0  # longest wait for a group's texts

OnScored = Callable[[int, Prompt, Group, Scores], None]


@dataclass(frozen=True, slots=True)
class Estimate:
    """max@k (pass@k on 0/1 rewards) or maj@k: mean over prompts with its bootstrap interval."""

    k: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TagValue:
    """The prompts with one value of a tag, such as level 5."""

    tag: str
    value: str
    prompts: int
    estimates: tuple[Estimate, ...]
    majority: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of one version.

    Attributes:
        version: the weights it was made with.
        estimates: one for each k, in the job's order.
        rewards_PN: float64 [P, n], every sample's reward.
        distinct_answers: mean number of different answers to a prompt; None where the scorer extracts none.
        majority: maj@k for each k; empty where the scorer extracts no answers, or pays one answer in two ways.
        by_tag: the same for the prompts of each value of each tag.
    """

    version: int
    estimates: tuple[Estimate, ...]
    rewards_PN: NDArray[np.float64]
    distinct_answers: float | None
    majority: tuple[Estimate, ...] = ()
    by_tag: tuple[TagValue, ...] = ()

    def row(self) -> dict[str, object]:
        """The evaluation as a JSON object, rewards left out."""
        return {
            "version": self.version,
            "prompts": self.rewards_PN.shape[0],
            "n": self.rewards_PN.shape[1],
            "distinct_answers": self.distinct_answers,
            "estimates": _rows(self.estimates),
            "majority": _rows(self.majority),
            "by_tag": [
                {
                    "tag": each.tag,
                    "value": each.value,
                    "prompts": each.prompts,
                    "estimates": _rows(each.estimates),
                    "majority": _rows(each.majority),
                }
                for each in self.by_tag
            ],
        }


def _rows(estimates: Sequence[Estimate]) -> list[dict[str, float]]:
    return [{"k": e.k, "mean": e.mean, "low": e.low, "high": e.high} for e in estimates]


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
    known: Mapping[str, Scores] | None = None,
) -> Evaluation:
    """Sample and score every prompt under the weights the actors serve, and estimate.

    Args:
        ks: of the estimates; the other arguments are those of `sample_and_score`.

    Raises:
        HostError: a sample could not be scored; an evaluation with holes would mislead.
    """
    version = actors.version
    scored = await sample_and_score(
        prompts,
        sampling,
        actors=actors,
        rewards=rewards,
        at_once=at_once,
        seed=seed,
        on_group=on_group,
        on_scored=on_scored,
        known=known,
    )
    _check_scored(scored)
    rewards_PN = np.stack([scores.rewards_n for scores in scored])
    answers_PN = np.stack([scores.answers_n for scores in scored])
    return summarise([each.prompt for each in prompts], rewards_PN, answers_PN, ks, version=version, seed=seed)


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
    known: Mapping[str, Scores] | None = None,
) -> list[Scores]:
    """The scores of n samples of every prompt, in the order of the prompts.

    Args:
        at_once: groups in flight.
        seed: of the bootstrap, and of the samples where ``sampling.seeded``.
        on_group: called after each group, for progress displays.
        on_scored: told of each group with its samples, as it is scored.
        known: scores of prompts that are done, by id: these are not sampled again.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(index: int, encoded: EncodedPrompt) -> Scores:
        if known and encoded.prompt.id in known:
            on_group()
            return known[encoded.prompt.id]
        async with gate:
            group, _ = await actors.generate(
                GenerateRequest(
                    group_id=-1 - index,  # outside the run's own numbering
                    prompt_id=encoded.prompt.id,
                    prompt_p=encoded.tokens_p,
                    n=sampling.n,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=sampling.max_tokens,
                    seed=(seed * 1_000_003 + index) % 2**63 if sampling.seeded else None,
                )
            )
            scores = await rewards.score(group, encoded.prompt)
            if on_scored is not None:
                on_scored(index, encoded.prompt, await asyncio.wait_for(_value(group), GROUP_S), scores)
            on_group()
            return scores

    try:
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(one(index, encoded)) for index, encoded in enumerate(prompts)]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return [task.result() for task in pending]


def summarise(
    prompts: Sequence[Prompt],
    rewards_PN: NDArray[np.float64],
    answers_PN: NDArray[np.int32],
    ks: Sequence[int],
    *,
    version: int,
    seed: int,
) -> Evaluation:
    """The estimates of what was sampled, over all prompts and over those of each value of each tag.

    Args:
        rewards_PN, answers_PN: [P, n]; a negative answer id is no answer.
        seed: of the bootstrap.
    """
    best = {k: max_at_k(rewards_PN, k) for k in ks}
    voted = _voted(rewards_PN, answers_PN, ks)
    everything = np.ones(len(prompts), dtype=bool)
    return Evaluation(
        version=version,
        estimates=_estimates(best, everything, seed),
        rewards_PN=rewards_PN,
        distinct_answers=_distinct(answers_PN),
        majority=_estimates(voted, everything, seed),
        by_tag=tuple(
            TagValue(tag, value, int(mine.sum()), _estimates(best, mine, seed), _estimates(voted, mine, seed))
            for tag, value, mine in tag_values(prompts)
        ),
    )


async def _value(reference: Any) -> Any:
    return await reference


def _voted(
    rewards_PN: NDArray[np.float64], answers_PN: NDArray[np.int32], ks: Sequence[int]
) -> dict[int, NDArray[np.float64]]:
    """maj@k of each prompt for each k; empty where votes mean nothing: no answers, or one answer with two rewards."""
    if not (answers_PN >= 0).any() or not _one_reward_an_answer(rewards_PN, answers_PN):
        return {}
    return {k: maj_at_k(answers_PN, rewards_PN, k) for k in ks}


def _one_reward_an_answer(rewards_PN: NDArray[np.float64], answers_PN: NDArray[np.int32]) -> bool:
    for rewards_n, answers_n in zip(rewards_PN.tolist(), answers_PN.tolist(), strict=True):
        paid: dict[int, float] = {}
        for reward, answer in zip(rewards_n, answers_n, strict=True):
            if answer >= 0 and paid.setdefault(answer, reward) != reward:
                return False
    return True


def tag_values(prompts: Sequence[Prompt]) -> list[tuple[str, str, NDArray[np.bool_]]]:
    """(tag, value, bool [P] of the prompts that have it), sorted; a tag of too many values is left out."""
    found = []
    for tag in sorted({tag for prompt in prompts for tag in prompt.tags}):
        values = sorted({prompt.tags[tag] for prompt in prompts if tag in prompt.tags})
        if len(values) <= MAX_VALUES:
            found += [(tag, value, np.array([each.tags.get(tag) == value for each in prompts])) for value in values]
    return found


def _check_scored(scored: Sequence[Scores]) -> None:
    unscored = [verdict.detail for scores in scored for verdict in scores.verdicts if verdict.reward is None]
    if unscored:
        prompts = sum(bool(np.isnan(scores.rewards_n).any()) for scores in scored)
        raise HostError(
            f"evaluation: samples of {prompts} prompts could not be scored: {unscored[0] or 'no reason given'}"
        )


def _distinct(answers_PN: NDArray[np.int32]) -> float | None:
    """Mean number of different answers to a prompt; None where the scorer extracts none."""
    if not (answers_PN >= 0).any():
        return None
    return float(np.mean([len(set(answers_n[answers_n >= 0].tolist())) for answers_n in answers_PN]))


def _estimates(values: Mapping[int, NDArray[np.float64]], mine_P: NDArray[np.bool_], seed: int) -> tuple[Estimate, ...]:
    """Mean and interval over the prompts of ``mine_P``, for each k."""
    estimates = []
    for k, values_P in values.items():
        low, high = bootstrap_interval(values_P[mine_P], level=LEVEL, seed=seed)
        estimates.append(Estimate(k, float(np.mean(values_P[mine_P])), low, high))
    return tuple(estimates)
