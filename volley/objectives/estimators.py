"""`advantages`: turns the rewards of a group into one advantage per sample, for every objective."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from volley.objectives import majority, majority_off_policy, maximum, off_policy, ranked, ranked_off_policy, shapes
from volley.objectives.combinatorics import FloatArray, IntArray
from volley.objectives.groups import Groups, buckets, read_groups
from volley.objectives.spec import (
    BUILT_IN,
    BestOfK,
    MajAtK,
    MaxAtK,
    MaxRL,
    Mean,
    Objective,
    ObjectiveOverSets,
    ObjectiveWithK,
    PassAtKAnalytic,
    RiskSensitive,
    Softmax,
    check_objective,
    largest_k,
    parse_objective,
    spare_samples,
)
from volley.objectives.tries import Terms, up_to
from volley.plugins import OBJECTIVES, ObjectivePlugin, plugin_of

SMALLEST_SPREAD = 1e-6  # of the largest reward; `normalize: std` takes less for rounding, such as that of float32
_SAMPLES_AT_ONCE = 2**15  # temporaries then stay in cache


class DropReason(StrEnum):
    """Why a group has no advantages."""

    TOO_FEW_VALID = "too_few_valid"
    """Fewer than two valid samples: nothing to compare with."""


@dataclass(frozen=True, slots=True)
class AdvantageReport:
    """Advantages and how they were computed.

    advantages: [..., n] float64.
    k: [...] the set size used in each group, the largest of several (n for objectives without k); 0 where the group
        was dropped.
    dropped: the reason for each dropped group, keyed by its index in the leading dimensions.
    truncated_share: share of the companion weights that were above `weight_cap`.
    focal_weights: [...] the weight of each group, 1 without `focal`.
    """

    advantages: FloatArray
    k: IntArray
    dropped: Mapping[tuple[int, ...], DropReason]
    truncated_share: float
    focal_weights: FloatArray

    @property
    def live_group_fraction(self) -> float:
        """The share of groups with an advantage other than zero."""
        live = (self.advantages != 0).any(axis=-1)
        return float(live.mean()) if live.size else 0.0


def advantages(
    rewards: ArrayLike,
    objective: Objective | Mapping[str, Any],
    *,
    log_weights: ArrayLike | None = None,
    answers: ArrayLike | None = None,
    ranks: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    k: ArrayLike | None = None,
) -> FloatArray:
    """The vector `a` of each group such that `sum_i a_i grad log pi(y_i)` estimates the objective's gradient.

    rewards: [..., n], finite wherever valid.
    log_weights: [..., n], `log pi(y_i) - log mu(y_i)` of whole samples; used only when `companion_weights` is
        not `none`. Without them the samples count as on-policy. The result is then `A_i = a_i / w_i`, to be multiplied
        by the sample's own ratio.
    answers: [..., n] integer ids, required by `maj_at_k`. Equal ids are votes for one answer; a negative id means no
        answer and agrees with no other vote.
    ranks: [..., n], finite wherever valid, required by `best_of_k`: the sample of highest rank is picked.
    valid: [..., n] bool; masked samples get 0 and do not count in n. k shrinks to what is left, and so does each k of
        weights; a group with fewer than two valid samples is all zeros.
    k: [...] integers that replace the objective's k per group (an adaptive schedule).

    Returns [..., n] float64.

    Raises:
        ValueError: a pairing that `check_objective` refuses, shapes that disagree, values that are not finite,
            rewards outside an objective's domain.
    """
    report = advantage_report(
        rewards, objective, log_weights=log_weights, answers=answers, ranks=ranks, valid=valid, k=k
    )
    return report.advantages


def advantage_report(
    rewards: ArrayLike,
    objective: Objective | Mapping[str, Any],
    *,
    log_weights: ArrayLike | None = None,
    answers: ArrayLike | None = None,
    ranks: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    k: ArrayLike | None = None,
) -> AdvantageReport:
    """Like `advantages`, and also reports dropped groups, the k each group used, and the share of truncated weights."""
    objective = parse_objective(objective)
    groups, lead = read_groups(rewards, log_weights, answers, valid, ranks)
    k_B = _k_of_groups(objective, groups, lead, k)
    rows, n = groups.g_BN.shape
    out_BN = np.zeros((rows, n))
    truncated = used = 0
    for bucket, bucket_k, index in buckets(groups, k_B):
        bucket, cut = _truncate(objective, bucket)
        truncated += cut
        used += bucket.g_BN.size
        with np.errstate(over="ignore", invalid="ignore"):  # what overflowed is refused below
            out_BN[index] = _bucket_advantages(objective, bucket, bucket_k)
    weight_B = np.ones(rows)
    if objective.focal:
        weight_B = shapes.focal_weights(groups.g_BN, groups.valid_BN, objective.focal)
        out_BN *= weight_B[:, None]
    if not np.isfinite(out_BN).all():
        raise ValueError(_overflow(objective, log_weights is not None))
    dropped_B = groups.valid_counts < 2
    return AdvantageReport(
        advantages=out_BN.reshape((*lead, n)),
        k=np.where(dropped_B, 0, k_B).reshape(lead),
        dropped={_index(row, lead): DropReason.TOO_FEW_VALID for row in np.flatnonzero(dropped_B)},
        truncated_share=truncated / used if used else 0.0,
        focal_weights=weight_B.reshape(lead),
    )


def _overflow(objective: Objective, weighted: bool) -> str:
    """Why advantages are not finite, and what to write instead."""
    companions = objective.companion_weights if weighted and isinstance(objective, ObjectiveOverSets) else "none"
    if companions == "none":
        return "rewards this large overflow float64: scale them down"
    if companions == "self_normalised":
        return (
            "some importance weights are so small that their reciprocals overflow float64: the samples are too far "
            "from the policy; lower max_lag, or mask such groups with valid="
        )
    capped = isinstance(objective, ObjectiveOverSets) and objective.weight_cap is not None
    return (
        "products of importance weights overflow float64: write companion_weights: self_normalised, or "
        f"{'a smaller weight_cap' if capped else 'a weight_cap'}"
    )


def _index(row: int, lead: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(row, lead)) if lead else ()


def _k_of_groups(objective: Objective, groups: Groups, lead: tuple[int, ...], k: ArrayLike | None) -> IntArray:
    """The k of each group: the requested k, lowered to what its valid samples allow."""
    n = groups.g_BN.shape[-1]
    if not isinstance(objective, ObjectiveWithK):
        if k is not None:
            raise ValueError(f"k= was given, but kind: {objective.kind} has no k; leave k= out")
        check_objective(objective, n)
        return groups.valid_counts
    if k is None:
        check_objective(objective, n)
        asked = np.asarray(largest_k(objective))
    else:
        asked = _asked_k(objective, k, n)
    asked_B = np.broadcast_to(asked, lead).reshape(-1)
    largest_B = np.maximum(groups.valid_counts - spare_samples(objective), 1)
    k_B: IntArray = np.minimum(asked_B, largest_B)
    return k_B


def _asked_k(objective: ObjectiveWithK, k: ArrayLike, n: int) -> IntArray:
    """The argument k= as integers that the objective allows."""
    if objective.k is None:
        raise ValueError(f"k= was given, but {objective.kind} has weights; leave k= out, or give the objective a k")
    asked = np.asarray(k)
    if not np.issubdtype(asked.dtype, np.integer):
        raise TypeError(f"k must be integers, got {asked.dtype}")
    for value in np.unique(asked):
        check_objective({**objective.model_dump(), "k": int(value)}, n)
    return asked


def _truncate(objective: Objective, bucket: Groups) -> tuple[Groups, int]:
    """Cap the companions' weights; also returns how many were above the cap."""
    if not isinstance(objective, ObjectiveOverSets) or objective.weight_cap is None or bucket.log_w_BN is None:
        return bucket, 0
    log_cap = math.log(objective.weight_cap)
    capped_BN = np.minimum(bucket.log_w_BN, log_cap)
    return replace(bucket, log_w_BN=capped_BN), int((bucket.log_w_BN > log_cap).sum())


def _bucket_advantages(objective: Objective, bucket: Groups, k: int) -> FloatArray:
    a_BN = _raw_advantages(objective, bucket, k)
    if objective.center:
        a_BN = a_BN - a_BN.mean(axis=-1, keepdims=True)
        if objective.kind in BUILT_IN:  # a plug-in may tell samples of equal rewards apart
            a_BN[_spread(bucket) == 0] = 0.0  # what rounding leaves of equal advantages is no signal
    if objective.normalize == "std":
        differ_B = _spread(bucket) > SMALLEST_SPREAD * np.abs(bucket.g_BN).max(axis=-1)
        a_BN = np.divide(a_BN, _deviation(bucket.g_BN), out=np.zeros_like(a_BN), where=differ_B[:, None])
    return a_BN


def _spread(bucket: Groups) -> FloatArray:
    """The largest reward of each group less the smallest, [B]."""
    spread_B: FloatArray = np.ptp(bucket.g_BN, axis=-1)
    return spread_B


def _deviation(g_BN: FloatArray) -> FloatArray:
    """The population standard deviation of each group, [B, 1], of rewards whose squares may not be float64 numbers."""
    _, exponent_B1 = np.frexp(np.abs(g_BN).max(axis=-1, keepdims=True))
    deviation_B1: FloatArray = np.ldexp(np.ldexp(g_BN, -exponent_B1).std(axis=-1, keepdims=True), exponent_B1)
    return deviation_B1


def _raw_advantages(objective: Objective, bucket: Groups, k: int) -> FloatArray:
    """Dispatch on the kind, before centring and normalisation."""
    g_BN = bucket.g_BN
    if objective.kind not in BUILT_IN:
        return _plugged_in(objective, bucket)
    match objective:
        case Mean():
            return maximum.leave_one_out_mean(g_BN)
        case Softmax(beta=beta):
            return shapes.softmax_leave_one_out(g_BN, beta)
        case PassAtKAnalytic():
            return shapes.pass_at_k_analytic(g_BN, k)
        case MaxRL():
            return shapes.maxrl(g_BN)
        case RiskSensitive(beta=beta):
            return shapes.risk_sensitive(g_BN, beta)
        case MajAtK():
            return _maj_at_k(objective, bucket, k)
        case BestOfK():
            return _best_of_k(objective, bucket, k)
        case MaxAtK():
            return _max_at_k(objective, bucket, k)


def _plugged_in(objective: Objective, bucket: Groups) -> FloatArray:
    """A plug-in's advantages, [B, N]. Raises ValueError if their shape is wrong or one is not finite."""
    compute = plugin_of(OBJECTIVES, objective.kind, ObjectivePlugin).advantages
    a_BN = np.array(compute(bucket.g_BN.copy(), bucket.answers_BN, objective), dtype=np.float64)
    if a_BN.shape != bucket.g_BN.shape or not np.isfinite(a_BN).all():
        raise ValueError(
            f"plug-in {objective.kind} returned advantages of shape {a_BN.shape} for rewards of shape "
            f"{bucket.g_BN.shape}{'' if np.isfinite(a_BN).all() else ', some of them not finite'}"
        )
    return a_BN


def _terms(objective: ObjectiveOverSets, k: int) -> Terms:
    """The objective's terms in a group where k is the largest: one k may differ by group, weights shrink to fit."""
    return ((k, 1.0),) if objective.weights is None else up_to(objective.terms, k)


def _maj_at_k(objective: MajAtK, bucket: Groups, k: int) -> FloatArray:
    if bucket.answers_BN is None:
        raise ValueError("maj_at_k needs answers=, integer ids of the answers in the shape of rewards")
    answers = majority.read_answers(bucket.answers_BN, bucket.g_BN)  # validates the answers, for k = 1 too
    profiles = majority.vote_profiles(answers)
    a_BN = np.zeros_like(bucket.g_BN)
    for each, weight in _terms(objective, k):
        if each == 1:
            a_BN += weight * maximum.leave_one_out_mean(bucket.g_BN)
        elif objective.companion_weights == "none" or bucket.log_w_BN is None:
            per_answer_GA = majority.loo_minus_one_profiles(profiles, each)
            a_BN += weight * per_answer_GA[profiles.profile_B[:, None], answers.slot_BN]
        else:
            log_w_BN, log_scale_B1 = off_policy.common_scale(bucket.log_w_BN, each, objective.companion_weights)
            a_BN += weight * majority_off_policy.loo_minus_one_off_policy(answers, log_w_BN, log_scale_B1, each)
    return a_BN


def _best_of_k(objective: BestOfK, bucket: Groups, k: int) -> FloatArray:
    if bucket.rank_BN is None:
        raise ValueError(
            "best_of_k needs ranks=, the score that picks, in the shape of rewards; in a job the scorer returns it as "
            "rank, and where the reward itself picks the objective is kind: max_at_k"
        )
    order_BN = np.argsort(bucket.rank_BN, axis=-1)
    r_BN = np.take_along_axis(bucket.g_BN, order_BN, axis=-1)
    rank_BN = np.take_along_axis(bucket.rank_BN, order_BN, axis=-1)
    a_BN, terms = np.zeros_like(r_BN), _terms(objective, k)
    if objective.companion_weights == "none" or bucket.log_w_BN is None:
        a_BN = ranked.best_of_k_advantages(r_BN, rank_BN, terms)
    else:
        log_w_BN = np.take_along_axis(bucket.log_w_BN, order_BN, axis=-1)
        for each, weight in terms:
            if each == 1:
                a_BN += weight * maximum.leave_one_out_mean(r_BN)
                continue
            log_unit_BN, log_scale_B1 = off_policy.common_scale(log_w_BN, each, objective.companion_weights)
            a_BN += weight * ranked_off_policy.best_of_k_off_policy(r_BN, rank_BN, log_unit_BN, log_scale_B1, each)
    out_BN = np.empty_like(a_BN)
    np.put_along_axis(out_BN, order_BN, a_BN, axis=-1)
    return out_BN


def _max_at_k(objective: MaxAtK, bucket: Groups, k: int) -> FloatArray:
    if k == 1 and objective.weights is None:
        return maximum.leave_one_out_mean(bucket.g_BN)
    terms = _terms(objective, k)
    out_BN = np.empty_like(bucket.g_BN)
    step = max(1, _SAMPLES_AT_ONCE // bucket.g_BN.shape[-1])
    for start in range(0, len(out_BN), step):
        rows = slice(start, start + step)
        log_w_RN = None if bucket.log_w_BN is None else bucket.log_w_BN[rows]
        order_RN = np.argsort(bucket.g_BN[rows], axis=-1)
        a_RN = _max_at_k_in_order(objective, bucket.g_BN[rows], log_w_RN, order_RN, terms)
        np.put_along_axis(out_BN[rows], order_RN, a_RN, axis=-1)
    return out_BN


def _max_at_k_in_order(
    objective: MaxAtK, g_BN: FloatArray, log_w_BN: FloatArray | None, order_BN: IntArray, terms: Terms
) -> FloatArray:
    """Advantages, sorted by ascending reward."""
    g_BN = np.take_along_axis(g_BN, order_BN, axis=-1)
    if objective.companion_weights == "none" or log_w_BN is None:
        return maximum.max_at_k_advantages(g_BN, terms, objective.baseline)
    log_w_BN = np.take_along_axis(log_w_BN, order_BN, axis=-1)
    if objective.companion_weights == "first_order":
        return off_policy.first_order_advantages(g_BN, log_w_BN, terms)
    return off_policy.exact_advantages(g_BN, log_w_BN, terms, objective.baseline, objective.companion_weights)
