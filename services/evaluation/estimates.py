"""What an evaluation reports: unbiased estimates of max@k and maj@k, lengths, entropy; overall and by tag.

A sample that could not be scored is left out: each estimate is over the scored samples of a prompt, and over the
prompts that have k of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from volley.objectives import best_of_k, bootstrap_interval, maj_at_k, max_at_k
from volley.objectives.tries import Terms, mean_over
from volley.records import NO_ANSWER, Prompt, Scores

_T = TypeVar("_T", bound=np.generic)
LEVEL = 0.95
MAX_VALUES = 64  # a tag with more values, such as an id, is no useful breakdown


@dataclass(frozen=True, slots=True)
class Sampled:
    """The n samples of one prompt.

    Attributes:
        tokens: number of tokens in all n samples.
        logprob: sum of the log-probs with which these tokens were sampled.
        calls: of the model, in all n episodes; None if no program made them.
    """

    scores: Scores
    tokens: int
    logprob: float
    calls: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """max@k (pass@k for 0/1 rewards) or maj@k: the mean over prompts and its bootstrap interval.

    Attributes:
        left_out: prompts with fewer than k scored samples, which the mean does not cover.
    """

    k: int
    mean: float
    low: float
    high: float
    left_out: int = 0


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
        unscored: samples that could not be scored.
        estimates: max@k for each k for which a prompt has k scored samples, in the job's order.
        majority: maj@k for each k; empty if the scorer extracts no answers, or gives one answer different rewards.
        picked: best-of-k by rank for each k; empty unless the scorer ranks every sample.
        weighted: the weighted mean of max@k, over prompts with enough scored samples for the largest k; None without
            weights or such prompts.
        weighted_majority: the same of maj@k; None also where ``majority`` is empty.
        weighted_picked: the same of best-of-k; None also where ``picked`` is empty.
        distinct_answers: mean number of distinct answers per prompt; None if the scorer extracts no answers.
        length_mean: mean tokens per sample.
        calls_mean: mean calls of the model per episode; None without a program.
        entropy: nats per token; None if no token was sampled.
    """

    prompts: int
    unscored: int
    estimates: tuple[Estimate, ...]
    majority: tuple[Estimate, ...]
    picked: tuple[Estimate, ...]
    weighted: WeightedMean | None
    weighted_majority: WeightedMean | None
    weighted_picked: WeightedMean | None
    distinct_answers: float | None
    length_mean: float
    calls_mean: float | None
    entropy: float | None

    def row(self) -> dict[str, object]:
        """The figures as a JSON object."""
        return {
            "prompts": self.prompts,
            "unscored": self.unscored,
            "distinct_answers": self.distinct_answers,
            "length_mean": self.length_mean,
            "calls_mean": self.calls_mean,
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
    return [asdict(estimate) for estimate in estimates]


@dataclass(frozen=True, slots=True)
class _Columns:
    """What was scored of P prompts.

    Attributes:
        counts_P: number of scored samples per prompt.
        rewards_PN, answers_PN, ranks_PN: the scored samples of each prompt, followed by the others.
    """

    counts_P: NDArray[np.int64]
    rewards_PN: NDArray[np.float64]
    answers_PN: NDArray[np.int32]
    ranks_PN: NDArray[np.float64]

    @classmethod
    def of(cls, sampled: Sequence[Sampled]) -> Self:
        rewards_PN = np.stack([each.scores.rewards_n for each in sampled])
        order_PN = np.argsort(np.isnan(rewards_PN), axis=-1, kind="stable")

        def sort(columns: Sequence[NDArray[_T]]) -> NDArray[_T]:
            return np.take_along_axis(np.stack(columns), order_PN, axis=-1)

        return cls(
            (~np.isnan(rewards_PN)).sum(axis=-1),
            sort([each.scores.rewards_n for each in sampled]),
            sort([each.scores.answers_n for each in sampled]),
            sort([each.scores.ranks_n for each in sampled]),
        )

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        return np.arange(self.rewards_PN.shape[1]) < self.counts_P[:, None]

    def best(self, k: int) -> NDArray[np.float64]:
        return self._of_scored(k, lambda rows, m: max_at_k(self.rewards_PN[rows, :m], k))

    def voted(self, k: int) -> NDArray[np.float64]:
        return self._of_scored(k, lambda rows, m: maj_at_k(self.answers_PN[rows, :m], self.rewards_PN[rows, :m], k))

    def picked(self, k: int) -> NDArray[np.float64]:
        return self._of_scored(k, lambda rows, m: best_of_k(self.rewards_PN[rows, :m], self.ranks_PN[rows, :m], k))

    def _of_scored(self, k: int, value: Callable[[NDArray[np.bool_], int], NDArray[np.float64]]) -> NDArray[np.float64]:
        """A value per prompt from its scored samples; NaN for prompts with fewer than k. Prompts with m go together."""
        values_P = np.full(len(self.counts_P), np.nan)
        for m in np.unique(self.counts_P[self.counts_P >= k]).tolist():
            values_P[self.counts_P == m] = value(self.counts_P == m, m)
        return values_P


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
        sampled: one entry per prompt, all with the same n.
        terms: the k and weights of the weighted means; () for none.
        seed: seeds the bootstrap.
    """
    columns = _Columns.of(sampled)
    tokens_P = np.array([each.tokens for each in sampled])
    logprob_P = np.array([each.logprob for each in sampled])
    calls_P = np.array([np.nan if each.calls is None else each.calls for each in sampled])
    votes, ranked = _votes_mean_something(columns), bool(np.isfinite(columns.ranks_PN[columns.is_scored]).all())
    best = {k: columns.best(k) for k in ks}
    voted = {k: columns.voted(k) for k in ks} if votes else {}
    picked = {k: columns.picked(k) for k in ks} if ranked else {}
    weighted_P = mean_over(terms, columns.best) if terms else None
    voted_weighted_P = mean_over(terms, columns.voted) if terms and votes else None
    picked_weighted_P = mean_over(terms, columns.picked) if terms and ranked else None
    n = columns.rewards_PN.shape[1]

    def figures(chosen_P: NDArray[np.bool_]) -> Figures:
        prompts, tokens = int(chosen_P.sum()), int(tokens_P[chosen_P].sum())
        return Figures(
            prompts=prompts,
            unscored=int((n - columns.counts_P[chosen_P]).sum()),
            estimates=_estimates(best, chosen_P, seed),
            majority=_estimates(voted, chosen_P, seed),
            picked=_estimates(picked, chosen_P, seed),
            weighted=_weighted(weighted_P, chosen_P, seed),
            weighted_majority=_weighted(voted_weighted_P, chosen_P, seed),
            weighted_picked=_weighted(picked_weighted_P, chosen_P, seed),
            distinct_answers=distinct(columns.answers_PN[chosen_P]),
            length_mean=tokens / (prompts * n),
            calls_mean=None if np.isnan(calls_P[chosen_P]).any() else float(calls_P[chosen_P].mean()) / n,
            entropy=-float(logprob_P[chosen_P].sum()) / tokens if tokens else None,
        )

    by_tag = tuple(TagValue(tag, value, figures(chosen_P)) for tag, value, chosen_P in tag_values(prompts))
    return Evaluation(version, n, terms, figures(np.ones(len(prompts), dtype=bool)), by_tag)


def _votes_mean_something(columns: _Columns) -> bool:
    """Whether scored samples have answers, and each answer one reward."""
    is_scored, answered = columns.is_scored, False
    for rewards_n, answers_n in zip(
        np.where(is_scored, columns.rewards_PN, 0.0).tolist(),
        np.where(is_scored, columns.answers_PN, NO_ANSWER).tolist(),
        strict=True,
    ):
        reward_of: dict[int, float] = {}
        for reward, answer in zip(rewards_n, answers_n, strict=True):
            if answer >= 0 and reward_of.setdefault(answer, reward) != reward:
                return False
        answered |= bool(reward_of)
    return answered


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
    """Mean and interval over the prompts that ``chosen_P`` marks and that have a value; None if there are none."""
    if values_P is None:
        return None
    found = _estimates({0: values_P}, chosen_P, seed)
    return WeightedMean(found[0].mean, found[0].low, found[0].high) if found else None


def _estimates(
    values: Mapping[int, NDArray[np.float64]], chosen_P: NDArray[np.bool_], seed: int
) -> tuple[Estimate, ...]:
    """For each k, mean and interval over the prompts that ``chosen_P`` marks and that have a value, if any do."""
    estimates = []
    for k, values_P in values.items():
        known_P = values_P[chosen_P & ~np.isnan(values_P)]
        if len(known_P):
            low, high = bootstrap_interval(known_P, level=LEVEL, seed=seed)
            left_out = int(chosen_P.sum()) - len(known_P)
            estimates.append(Estimate(k, float(np.mean(known_P)), low, high, left_out))
    return tuple(estimates)
