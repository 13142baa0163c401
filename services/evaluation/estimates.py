"""What an evaluation reports: unbiased estimates of max@k and maj@k, lengths, entropy; overall and by tag."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from volley.objectives import best_of_k, bootstrap_interval, maj_at_k, max_at_k
from volley.objectives.tries import Terms, mean_over
from volley.records import Prompt, Scores

LEVEL = 0.95
MAX_VALUES = 64  # a tag with more values, such as an id, is no useful breakdown


@dataclass(frozen=True, slots=True)
class Sampled:
    """The n samples of one prompt.

    Attributes:
        tokens: number of tokens in all n samples.
        logprob: sum of the log-probs with which these tokens were sampled.
    """

    scores: Scores
    tokens: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """max@k (pass@k for 0/1 rewards) or maj@k: the mean over prompts and its bootstrap interval."""

    k: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """The mean of pass@k, or of maj@k, over several k with a weight each, and its bootstrap interval over prompts."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a set of prompts. Names and units are those of `volley.metrics.EVALUATION`.

    Attributes:
        estimates: max@k for each k, in the job's order.
        majority: maj@k for each k; empty if the scorer extracts no answers, or gives one answer different rewards.
        picked: best-of-k by rank for each k; empty unless the scorer ranks every sample.
        weighted: the weighted mean of max@k; None without weights.
        weighted_majority: the same of maj@k; None also where ``majority`` is empty.
        weighted_picked: the same of best-of-k; None also where ``picked`` is empty.
        distinct_answers: mean number of distinct answers per prompt; None if the scorer extracts no answers.
        length_mean: mean tokens per sample.
        entropy: nats per token; None if no token was sampled.
    """

    prompts: int
    estimates: tuple[Estimate, ...]
    majority: tuple[Estimate, ...]
    picked: tuple[Estimate, ...]
    weighted: WeightedMean | None
    weighted_majority: WeightedMean | None
    weighted_picked: WeightedMean | None
    distinct_answers: float | None
    length_mean: float
    entropy: float | None

    def row(self) -> dict[str, object]:
        """The figures as a JSON object."""
        return {
            "prompts": self.prompts,
            "distinct_answers": self.distinct_answers,
            "length_mean": self.length_mean,
            "entropy": self.entropy,
            "estimates": _rows(self.estimates),
            "majority": _rows(self.majority),
            "picked": _rows(self.picked),
            "weighted": None if self.weighted is None else asdict(self.weighted),
            "weighted_majority": None if self.weighted_majority is None else asdict(self.weighted_majority),
            "weighted_picked": None if self.weighted_picked is None else asdict(self.weighted_picked),
        }


@dataclass(frozen=True, slots=True)
class TagValue:
    """The prompts with one value of a tag, such as level 5."""

    tag: str
    value: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of one version, with ``n`` samples per prompt, overall and for each value of each tag.

    Attributes:
        terms: the k and weights of the weighted means; () if there are none.
    """

    version: int
    n: int
    terms: Terms
    figures: Figures
    by_tag: tuple[TagValue, ...] = ()

    def row(self) -> dict[str, object]:
        """The evaluation as a JSON object."""
        tags = [{"tag": each.tag, "value": each.value, **each.figures.row()} for each in self.by_tag]
        weights = {str(k): weight for k, weight in self.terms} or None
        return {"version": self.version, "n": self.n, "weights": weights, **self.figures.row(), "by_tag": tags}


def _rows(estimates: Sequence[Estimate]) -> list[dict[str, float]]:
    return [{"k": e.k, "mean": e.mean, "low": e.low, "high": e.high} for e in estimates]


def summarise(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sampled],
    ks: Sequence[int],
    *,
    terms: Terms = (),
    version: int,
    seed: int,
) -> Evaluation:
    """The figures of the samples, over all prompts and over the prompts with each value of each tag.

    Args:
        sampled: one entry per prompt, all with the same n; every sample has a reward.
        terms: the k and weights of the weighted means; () for none.
        seed: seeds the bootstrap.
    """
    rewards_PN = np.stack([each.scores.rewards_n for each in sampled])
    answers_PN = np.stack([each.scores.answers_n for each in sampled])
    tokens_P = np.array([each.tokens for each in sampled])
    logprob_P = np.array([each.logprob for each in sampled])
    best = {k: max_at_k(rewards_PN, k) for k in ks}
    voted = _voted(rewards_PN, answers_PN, ks)
    ranks_PN = np.stack([each.scores.ranks_n for each in sampled])
    picked = {k: best_of_k(rewards_PN, ranks_PN, k) for k in ks} if np.isfinite(ranks_PN).all() else {}
    weighted_P = mean_over(terms, partial(max_at_k, rewards_PN)) if terms else None
    voted_weighted_P = mean_over(terms, partial(maj_at_k, answers_PN, rewards_PN)) if terms and voted else None
    picked_weighted_P = mean_over(terms, partial(best_of_k, rewards_PN, ranks_PN)) if terms and picked else None
    n = rewards_PN.shape[1]

    def figures(chosen_P: NDArray[np.bool_]) -> Figures:
        prompts, tokens = int(chosen_P.sum()), int(tokens_P[chosen_P].sum())
        return Figures(
            prompts=prompts,
            estimates=_estimates(best, chosen_P, seed),
            majority=_estimates(voted, chosen_P, seed),
            picked=_estimates(picked, chosen_P, seed),
            weighted=_weighted(weighted_P, chosen_P, seed),
            weighted_majority=_weighted(voted_weighted_P, chosen_P, seed),
            weighted_picked=_weighted(picked_weighted_P, chosen_P, seed),
            distinct_answers=distinct(answers_PN[chosen_P]),
            length_mean=tokens / (prompts * n),
            entropy=-float(logprob_P[chosen_P].sum()) / tokens if tokens else None,
        )

    by_tag = tuple(TagValue(tag, value, figures(chosen_P)) for tag, value, chosen_P in tag_values(prompts))
    return Evaluation(version, n, terms, figures(np.ones(len(prompts), dtype=bool)), by_tag)


def _voted(
    rewards_PN: NDArray[np.float64], answers_PN: NDArray[np.int32], ks: Sequence[int]
) -> dict[int, NDArray[np.float64]]:
    """maj@k of each prompt for each k; empty if votes mean nothing: no answers, or one answer with two rewards."""
    if not (answers_PN >= 0).any() or not _one_reward_per_answer(rewards_PN, answers_PN):
        return {}
    return {k: maj_at_k(answers_PN, rewards_PN, k) for k in ks}


def _one_reward_per_answer(rewards_PN: NDArray[np.float64], answers_PN: NDArray[np.int32]) -> bool:
    for rewards_n, answers_n in zip(rewards_PN.tolist(), answers_PN.tolist(), strict=True):
        reward_of: dict[int, float] = {}
        for reward, answer in zip(rewards_n, answers_n, strict=True):
            if answer >= 0 and reward_of.setdefault(answer, reward) != reward:
                return False
    return True


def tag_values(prompts: Sequence[Prompt]) -> list[tuple[str, str, NDArray[np.bool_]]]:
    """(tag, value, bool [P] marking the prompts that have it), sorted, without tags that have too many values."""
    found = []
    for tag in sorted({tag for prompt in prompts for tag in prompt.tags}):
        values = sorted({prompt.tags[tag] for prompt in prompts if tag in prompt.tags})
        if len(values) <= MAX_VALUES:
            found += [(tag, value, np.array([each.tags.get(tag) == value for each in prompts])) for value in values]
    return found


def distinct(answers_PN: NDArray[np.int32]) -> float | None:
    """Mean number of distinct answers per prompt; None if the scorer extracts no answers."""
    if not (answers_PN >= 0).any():
        return None
    return float(np.mean([len(set(answers_n[answers_n >= 0].tolist())) for answers_n in answers_PN]))


def _weighted(values_P: NDArray[np.float64] | None, chosen_P: NDArray[np.bool_], seed: int) -> WeightedMean | None:
    """Mean and interval over the prompts that ``chosen_P`` marks."""
    if values_P is None:
        return None
    low, high = bootstrap_interval(values_P[chosen_P], level=LEVEL, seed=seed)
    return WeightedMean(float(np.mean(values_P[chosen_P])), low, high)


def _estimates(
    values: Mapping[int, NDArray[np.float64]], chosen_P: NDArray[np.bool_], seed: int
) -> tuple[Estimate, ...]:
    """Mean and interval over the prompts that ``chosen_P`` marks, for each k."""
    estimates = []
    for k, values_P in values.items():
        low, high = bootstrap_interval(values_P[chosen_P], level=LEVEL, seed=seed)
        estimates.append(Estimate(k, float(np.mean(values_P[chosen_P])), low, high))
    return tuple(estimates)
