"""On-policy advantages and metric for max@k, any 1 <= k <= n, in O(n log n).

P is Pass@K Policy Optimization (arXiv 2505.15201). Every function takes rewards already sorted ascending along
the last axis, `g_BN` [B, n], and returns values in that order. Two measures keep full precision at any n:
coefficients are correctly rounded ratios of binomials, and sums run over the non-negative gaps
`g_(m+1) - g_(m)` wherever the quantity does not change when all rewards are shifted.
"""

import numpy as np

from volley.objectives.combinatorics import FloatArray, binomial_ratios


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


def loo_minus_one(g_BN: FloatArray, k: int) -> FloatArray:
    """The mean over k-sets holding i of `max_I g - max_(I without i) g`, times k/n; needs k >= 2 (P eq. 33).

    A set without i whose best is below `g_(m+1)` lies among the m smallest, so each gap below `g_i` counts
    `C(m, k-1)` sets.
    """
    n = g_BN.shape[-1]
    out_BN = np.zeros_like(g_BN)
    gained_BM = np.diff(g_BN, axis=-1)
    gained_BM *= binomial_ratios(1, n, k - 1, n, k)
    np.cumsum(gained_BM, axis=-1, out=out_BN[..., 1:])
    return out_BN


def no_baseline(g_BN: FloatArray, k: int) -> FloatArray:
    """`s_i`: the mean over all k-sets of `max_I g` where i is in I, zero where it is not (P eq. 19-21)."""
    n = g_BN.shape[-1]
    own_BN = g_BN * binomial_ratios(0, n, k - 1, n, k)
    others_BN = g_BN * binomial_ratios(-1, n - 1, k - 2, n, k)
    return own_BN + _sum_after(others_BN)


def subset_loo(g_BN: FloatArray, k: int) -> FloatArray:
    """`max@k(g) - max@k(g_-i)`, the leave-one-out of the estimate itself; needs k <= n - 1."""
    n = g_BN.shape[-1]
    m_M = np.arange(1, n)
    below_M = (k / n) * binomial_ratios(1, n, k, n - 1, k)
    above_M = binomial_ratios(1, n, k, n, k) * (k * (n - m_M) / (m_M * (n - k)))
    gaps_BM = np.diff(g_BN, axis=-1)
    out_BN = np.zeros_like(g_BN)
    out_BN[..., 1:] += np.cumsum(gaps_BM * below_M, axis=-1)
    out_BN[..., :-1] -= _sum_from(gaps_BM * above_M)
    return out_BN


def loo(g_BN: FloatArray, k: int) -> FloatArray:
    """`s_i - k/(n-1) max@k(g_-i)`; needs k <= n - 1 (P eq. 29)."""
    n = g_BN.shape[-1]
    out_BN: FloatArray = subset_loo(g_BN, k)
    out_BN -= k / (n * (n - 1)) * max_at_k_without(g_BN, k)
    return out_BN


def max_at_k_without(g_BN: FloatArray, k: int) -> FloatArray:
    """The max@k estimate of `g_-i`, for every i; needs k <= n - 1."""
    n = g_BN.shape[-1]
    before_BN = g_BN * binomial_ratios(0, n, k - 1, n - 1, k)
    after_BN = g_BN * binomial_ratios(-1, n - 1, k - 1, n - 1, k)
    return _sum_before(before_BN) + _sum_after(after_BN)


def _sum_from(x_BN: FloatArray) -> FloatArray:
    """Sums over positions >= i."""
    return np.cumsum(x_BN[..., ::-1], axis=-1)[..., ::-1]


def _sum_before(x_BN: FloatArray) -> FloatArray:
    """Sums over positions < i, without subtracting from a sum over all."""
    out_BN = np.zeros_like(x_BN)
    np.cumsum(x_BN[..., :-1], axis=-1, out=out_BN[..., 1:])
    return out_BN


def _sum_after(x_BN: FloatArray) -> FloatArray:
    """Sums over positions > i."""
    out_BN = np.zeros_like(x_BN)
    out_BN[..., :-1] = _sum_from(x_BN[..., 1:])
    return out_BN
