"""Unbiased estimates of pass@k, max@k, maj@k and best-of-k from n samples per prompt."""

from typing import overload

import numpy as np
from numpy.typing import ArrayLike

from volley.objectives.combinatorics import FloatArray
from volley.objectives.groups import read_groups
from volley.objectives.majority import maj_at_k_profiles, read_answers, vote_profiles
from volley.objectives.maximum import max_at_k_sorted
from volley.objectives.off_policy import max_at_k_off_policy
from volley.objectives.ranked import best_of_k_sorted


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...
@overload
def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> float | FloatArray: ...
def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> float | FloatArray:
    """`1 - C(n-c, k) / C(n, k)`: the chance that k of n samples, c of which are correct, include a correct one.

    Integers or integer arrays that broadcast; a float when all are scalars. The ratio is a product of
    `1 - k/i` for i = n-c+1 .. n, summed as logarithms so that small and large chances are both precise.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
        TypeError: counts that are not integers.
    """
    n_X, c_X, k_X = np.broadcast_arrays(*(np.asarray(x) for x in (n, c, k)))
    if any(not np.issubdtype(x.dtype, np.integer) for x in (n_X, c_X, k_X)):
        raise TypeError("pass_at_k takes integer counts n, c, k")
    if (c_X < 0).any() or (c_X > n_X).any():
        raise ValueError("pass_at_k needs 0 <= c <= n")
    if (k_X < 1).any() or (k_X > n_X).any():
        raise ValueError("pass_at_k needs 1 <= k <= n; lower k or draw more samples")
    log_miss_X = np.zeros(n_X.shape)
    with np.errstate(divide="ignore"):
        for j in range(int(c_X.max(initial=0))):
            # a set of k avoids the j-th correct sample; -inf once fewer than k samples are left to choose from
            factor_X = np.log1p(-np.minimum(k_X / np.maximum(n_X - j, 1), 1.0))
            log_miss_X = log_miss_X + np.where(j < c_X, factor_X, 0.0)
    chance_X = 0.0 - np.expm1(log_miss_X)  # a plain 0, never -0
    return float(chance_X) if chance_X.ndim == 0 else chance_X


def max_at_k(rewards: ArrayLike, k: int, *, log_weights: ArrayLike | None = None) -> FloatArray:
    """The unbiased max@k estimate of each group from rewards [..., n]: [...].

    With `log_weights` [..., n] of whole samples it estimates the max@k of a policy other than the one that generated
    them: `(1/C(n,k)) sum_{|I|=k} (prod_{j in I} w_j) max_I g`.

    Raises:
        ValueError: unless 1 <= k <= n; a value is not finite, or products of weights overflow.
    """
    groups, lead = read_groups(rewards, log_weights)
    _check_k(k, groups.g_BN.shape[-1])
    order_BN = np.argsort(groups.g_BN, axis=-1)
    g_BN = np.take_along_axis(groups.g_BN, order_BN, axis=-1)
    if groups.log_w_BN is None:
        return _shaped(max_at_k_sorted(g_BN, k), lead)
    log_w_BN = np.take_along_axis(groups.log_w_BN, order_BN, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        value_B = max_at_k_off_policy(g_BN, log_w_BN, k)
    if not np.isfinite(value_B).all():
        raise ValueError("products of importance weights overflow float64: these samples are too far from the policy")
    return _shaped(value_B, lead)


def maj_at_k(answers: ArrayLike, rewards: ArrayLike, k: int) -> FloatArray:
    """The unbiased maj@k estimate of each group, uniform over tied answers: [...].

    answers: [..., n] integer ids, equal where the answers are; a negative id means no answer.
    rewards: [..., n], equal where the answers are.

    Raises:
        ValueError: unless 1 <= k <= n, a reward is not finite, or one answer of a group has two rewards.
    """
    groups, lead = read_groups(rewards, answers=answers)
    _check_k(k, groups.g_BN.shape[-1])
    if groups.answers_BN is None or not len(groups.g_BN):
        return _shaped(np.zeros(0), lead)
    profiles = vote_profiles(read_answers(groups.answers_BN, groups.g_BN))
    return _shaped(maj_at_k_profiles(profiles, k)[profiles.profile_B], lead)


def best_of_k(rewards: ArrayLike, ranks: ArrayLike, k: int) -> FloatArray:
    """The unbiased estimate of the reward of the sample that ranks highest among k, uniform over tied ranks: [...].

    rewards, ranks: [..., n].

    Raises:
        ValueError: unless 1 <= k <= n, or a value is not finite.
    """
    groups, lead = read_groups(rewards, ranks=ranks)
    _check_k(k, groups.g_BN.shape[-1])
    if groups.rank_BN is None:
        raise ValueError("best_of_k needs ranks, the score that picks, in the shape of rewards")
    order_BN = np.argsort(groups.rank_BN, axis=-1)
    r_BN = np.take_along_axis(groups.g_BN, order_BN, axis=-1)
    return _shaped(best_of_k_sorted(r_BN, np.take_along_axis(groups.rank_BN, order_BN, axis=-1), k), lead)


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} needs 1 <= k <= n, and the groups have n={n} samples; lower k or draw more samples")


def _shaped(x_B: FloatArray, lead: tuple[int, ...]) -> FloatArray:
    out: FloatArray = x_B.reshape(lead)[()]  # like NumPy's reductions, a scalar if no dimension is left
    return out


def bootstrap_interval(
    values_P: ArrayLike, level: float = 0.95, seed: int = 0, resamples: int = 4000
) -> tuple[float, float]:
    """A percentile bootstrap interval for the mean over prompts of a metric; `values_P` [P] has one value per prompt.

    Prompts are resampled, because samples of one prompt say little about another. The interval is asymptotic: with
    fewer than about 30 prompts it is too narrow.

    Raises:
        ValueError: no prompts, a value that is not finite, or a level outside (0, 1).
    """
    x_P = np.asarray(values_P, dtype=np.float64)
    if x_P.ndim != 1 or not x_P.size:
        raise ValueError(f"bootstrap_interval takes one value per prompt, [P] with P >= 1; got shape {x_P.shape}")
    if not np.isfinite(x_P).all():
        raise ValueError("a value is not finite; drop such prompts first")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is not between 0 and 1; write level=0.95 for a 95% interval")
    rng = np.random.default_rng(seed)
    means_R = np.array([x_P[rng.integers(x_P.size, size=x_P.size)].mean() for _ in range(resamples)])
    low, high = np.quantile(means_R, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
