"""Evaluation: n samples of every prompt, and the unbiased estimate of pass@k for each k."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.config import GenerateRequest
from services.roles import Generator, Judge
from services.start import first_error
from services.tokens import EncodedPrompt
from volley.errors import HostError
from volley.job import ActorsSpec, EvalSampling
from volley.objectives import bootstrap_interval, max_at_k
from volley.records import Scores

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """max@k (pass@k on 0/1 rewards): mean over prompts with its bootstrap interval."""

    k: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of one version.

    Attributes:
        version: the weights it was made with.
        estimates: one for each k, in the job's order.
        rewards_PN: float64 [P, n], every sample's reward.
        distinct_answers: mean number of different answers to a prompt; None where the scorer extracts none.
    """

    version: int
    estimates: tuple[Estimate, ...]
    rewards_PN: NDArray[np.float64]
    distinct_answers: float | None

    def row(self) -> dict[str, object]:
        """The evaluation as a JSON object, rewards left out."""
        return {
            "version": self.version,
            "prompts": self.rewards_PN.shape[0],
            "n": self.rewards_PN.shape[1],
            "distinct_answers": self.distinct_answers,
            "estimates": [{"k": e.k, "mean": e.mean, "low": e.low, "high": e.high} for e in self.estimates],
        }


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
) -> Evaluation:
    """Sample and score every prompt under the weights the actors serve.

    Args:
        at_once: groups in flight.
        seed: of the bootstrap, and of the samples where ``sampling.seeded``.
        on_group: called after each group, for progress displays.

    Raises:
        HostError: a sample could not be scored; an evaluation with holes would mislead.
    """
    version = actors.version
    gate = asyncio.Semaphore(at_once)

    async def one(index: int, encoded: EncodedPrompt) -> Scores:
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
                    seed=seed * 1_000_003 + index if sampling.seeded else None,
                )
            )
            scores = await rewards.score(group, encoded.prompt)
            on_group()
            return scores

    try:
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(one(index, encoded)) for index, encoded in enumerate(prompts)]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    scored = [task.result() for task in pending]
    _check_scored(scored)
    rewards_PN = np.stack([scores.rewards_n for scores in scored])
    answers_PN = np.stack([scores.answers_n for scores in scored])
    return Evaluation(
        version=version,
        estimates=tuple(_estimate(rewards_PN, k, seed) for k in ks),
        rewards_PN=rewards_PN,
        distinct_answers=_distinct(answers_PN),
    )


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


def _estimate(rewards_PN: NDArray[np.float64], k: int, seed: int) -> Estimate:
    values_P = max_at_k(rewards_PN, k)
    low, high = bootstrap_interval(values_P, level=LEVEL, seed=seed)
    return Estimate(k, float(np.mean(values_P)), low, high)
