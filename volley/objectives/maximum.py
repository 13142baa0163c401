"""On-policy advantages and metric for sums of max@k, any 1 <= k <= n, in O(n log n).

P is Pass@K Policy Optimization (arXiv 2505.15201). Every function takes rewards already sorted ascending along
the last axis, `g_BN` [B, n], and returns values in that order.

An advantage is linear in the sorted rewards, so a sum over k has one matrix for each (n, terms, baseline). In terms of
the lowest reward and the gaps `g_(m+1) - g_(m)`, m = 1 .. n-1, a column of that matrix has two values: one for the
samples above the gap and one for those below it. So three cached coefficients and two running sums replace the matrix
product; each coefficient is a sum of correctly rounded ratios of binomials, and equal rewards get equal advantages.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from volley.objectives.combinatorics import FloatArray, binomial_ratios
from volley.objectives.spec import Baseline
from volley.objectives.tries import Terms


class Coefficients(NamedTuple):
    """`a_(i) = lowest g_(1) + sum_{m<i} above_m gap_m + sum_{m>=i} below_m gap_m`; arrays [n - 1]."""

    lowest: float
    above_M: FloatArray
    below_M: FloatArray


def leave_one_out_mean(g_BN: FloatArray) -> FloatArray:
    """REINFORCE leave-one-out, `(g_i - mean(g_-i)) / n`; rewards in any order."""
    n = g_BN.shape[-1]
    above_min_BN = g_BN - g_BN.min(axis=-1, keepdims=True)  # equal rewards then give exact zeros
    out_BN: FloatArray = (above_min_BN - above_min_BN.mean(axis=-1, keepdims=True)) / (n - 1)
    return out_BN


def max_at_k_sorted(g_BN: FloatArray, k: int) -> FloatArray:
    """The unbiased max@k estimate of each group, [B] (P Thm 3)."""
    n = g_BN.shape[-1]
    return g_BN @ binomial_ratios(0, n, k - 1, n, k)


def max_at_k_advantages(g_BN: FloatArray, terms: Terms, baseline: Baseline) -> FloatArray:
    """The advantages of `sum_k w_k max@k`; `loo` and `subset_loo` need k <= n - 1."""
    lowest, above_M, below_M = coefficients(g_BN.shape[-1], terms, baseline)
    out_BN = np.zeros_like(g_BN)
    gaps_BM = np.diff(g_BN, axis=-1)
    if below_M.any():
        out_BN[..., :-1] = np.cumsum((gaps_BM * below_M)[..., ::-1], axis=-1)[..., ::-1]
    gaps_BM *= above_M
    out_BN[..., 1:] += np.cumsum(gaps_BM, axis=-1)
    if lowest:
        out_BN += lowest * g_BN[..., :1]
    return out_BN


@lru_cache(maxsize=512)
def coefficients(n: int, terms: Terms, baseline: Baseline) -> Coefficients:
    """The coefficients of a sum over k; read-only because they are cached. At k = 1, every baseline is `subset_loo`."""
    lowest, above_M, below_M = 0.0, np.zeros(n - 1), np.zeros(n - 1)
    for k, weight in terms:
        one = _OF_BASELINE[baseline if k > 1 else "subset_loo"](n, k)
        lowest += weight * one.lowest
        above_M += weight * one.above_M
        below_M += weight * one.below_M
    above_M.flags.writeable = below_M.flags.writeable = False
    return Coefficients(lowest, above_M, below_M)


def _loo_minus_one(n: int, k: int) -> Coefficients:
    """The mean over k-sets holding i of `max_I g - max_(I without i) g`, times k/n (P eq. 33).

    A set without i whose best is below `g_(m+1)` lies among the m smallest, so each gap below `g_i` counts
    `C(m, k-1)` sets.
    """
    return Coefficients(0.0, binomial_ratios(1, n, k - 1, n, k), np.zeros(n - 1))


def _no_baseline(n: int, k: int) -> Coefficients:
    """`s_i`: the mean over all k-sets of `max_I g` where i is in I, zero where it is not (P eq. 19-21)."""
    below_M = k / n * (1 - binomial_ratios(0, n - 1, k - 1, n - 1, k - 1))
    return Coefficients(k / n, np.full(n - 1, k / n), below_M)


def _subset_loo(n: int, k: int) -> Coefficients:
    """`max@k(g) - max@k(g_-i)`, the leave-one-out of the estimate itself."""
    m_M = np.arange(1, n)
    above_M = k / n * binomial_ratios(1, n, k, n - 1, k)
    below_M = binomial_ratios(1, n, k, n, k) * (k * (n - m_M) / (m_M * (n - k)))
    return Coefficients(0.0, above_M, -below_M)


def _loo(n: int, k: int) -> Coefficients:
    """`s_i - k/(n-1) max@k(g_-i)` (P eq. 29)."""
    own, share = _subset_loo(n, k), k / (n * (n - 1))
    return Coefficients(
        -share,
        own.above_M - share * (1 - binomial_ratios(1, n, k, n - 1, k)),
        own.below_M - share * (1 - binomial_ratios(0, n - 1, k, n - 1, k)),
    )


_OF_BASELINE = {"none": _no_baseline, "loo": _loo, "subset_loo": _subset_loo, "loo_minus_one": _loo_minus_one}
