"""Evaluation: n samples of every prompt, and the unbiased estimate of pass@k for each k."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.config import GenerateRequest
from services.roles import Generator, Judge
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
        distinct: mean number of different texts per group of n.
    """

    version: int
    estimates: tuple[Estimate, ...]
    rewards_PN: NDArray[np.float64]
    distinct: float

    def row(self) -> dict[str, object]:
        """The evaluation as a JSON object, rewards left out."""
        return {
            "version": self.version,
            "prompts": self.rewards_PN.shape[0],
            "n": self.rewards_PN.shape[1],
            "distinct": self.distinct,
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

    async with asyncio.TaskGroup() as tasks:
        pending = [tasks.create_task(one(index, encoded)) for index, encoded in enumerate(prompts)]
    rewards_PN = np.stack([task.result().rewards_n for task in pending])
    if np.isnan(rewards_PN).any():
        missing = int(np.isnan(rewards_PN).any(axis=1).sum())
        raise HostError(f"evaluation: samples of {missing} prompts could not be scored; see the reward workers' logs")
    answers = [{answer for answer in task.result().answers_n.tolist() if answer >= 0} for task in pending]
    return Evaluation(
        version=version,
        estimates=tuple(_estimate(rewards_PN, k, seed) for k in ks),
        rewards_PN=rewards_PN,
        distinct=float(np.mean([len(found) for found in answers])),
    )


def _estimate(rewards_PN: NDArray[np.float64], k: int, seed: int) -> Estimate:
    values_P = max_at_k(rewards_PN, k)
    low, high = bootstrap_interval(values_P, level=LEVEL, seed=seed)
    return Estimate(k, float(np.mean(values_P)), low, high)
