"""Off-policy max@k: what the importance weights of the other samples of a set do to an advantage.

A sample's own weight is left to the policy update (its ratio), so the returned advantage `A_i = a_i / w_i`
depends on the other samples' weights only. Derivation: order the group by reward; a set without i whose best is
below `g_(m+1)` lies among the m smallest, so with `e_j` the elementary symmetric polynomial of degree j

    A_(i) = sum_{m<i} (g_(m+1) - g_(m)) e_{k-1}(w_(1..m)) / C(n, k)
          = sum_{m<i} (g_(m+1) - g_(m)) C(m, k-1) / C(n, k) * E_{k-1}(w_(1..m))

where `E_j(w_1..m) = e_j / C(m, j)` is the mean product over the sets: the on-policy estimate with each term
multiplied by the mean weight of its sets. All terms are non-negative, so log space loses none of them.
"""

import numpy as np

from volley.objectives.combinatorics import FloatArray, binomial_ratios
from volley.objectives.spec import CompanionWeights


def loo_minus_one_off_policy(
    g_BN: FloatArray, log_w_BN: FloatArray, k: int, companion_weights: CompanionWeights
) -> FloatArray:
    """`A_i` of the `loo_minus_one` baseline; needs k >= 2. Both arrays are ordered by reward, ascending.

    `exact` is unbiased when the sample's own ratio multiplies it. `first_order` takes
    `prod w_j = 1 + sum (w_j - 1)`. `self_normalised` divides by `e_k(w) / C(n, k)`.
    """
    n = g_BN.shape[-1]
    out_BN = np.zeros_like(g_BN)
    gained_BM = np.diff(g_BN, axis=-1) * binomial_ratios(1, n, k - 1, n, k)
    if companion_weights == "first_order":
        sizes_M = np.arange(1, n)
        excess_BM = np.cumsum(np.expm1(log_w_BN[..., :-1]), axis=-1) / sizes_M
        np.cumsum(gained_BM * (1 + (k - 1) * excess_BM), axis=-1, out=out_BN[..., 1:])
        return out_BN
    log_mean_BM, log_mean_all_B1 = log_mean_products(log_w_BN, k)
    if companion_weights == "self_normalised":
        log_mean_BM = log_mean_BM - log_mean_all_B1
    with np.errstate(divide="ignore"):
        np.cumsum(np.exp(np.log(gained_BM) + log_mean_BM), axis=-1, out=out_BN[..., 1:])
    return out_BN


def log_mean_products(log_w_BN: FloatArray, k: int) -> tuple[FloatArray, FloatArray]:
    """`log E_{k-1}(w_1..m)` for m = 1 .. n - 1, [B, n-1], and `log E_k(w_1..n)`, [B, 1]; O(n k).

    Recursion: a j-set of the first m either lacks sample m or holds it, so
    `E_j(1..m) = (1 - j/m) E_j(1..m-1) + (j/m) w_m E_{j-1}(1..m-1)`: a convex combination, in log space.
    """
    *lead, n = log_w_BN.shape
    log_e_JB = np.full((k + 1, *lead), -np.inf)
    log_e_JB[0] = 0.0
    prefix_BM = np.full((*lead, n - 1), -np.inf)
    for m in range(1, n + 1):
        lo, hi = max(1, k - 1 - (n - m)), min(m, k)  # degrees that still reach k - 1
        share_J = np.arange(lo, hi + 1).reshape(-1, *[1] * len(lead)) / m
        with np.errstate(divide="ignore"):
            log_lacks_J, log_holds_J = np.log1p(-share_J), np.log(share_J)
        held_JB = log_holds_J + log_w_BN[..., m - 1] + log_e_JB[lo - 1 : hi]
        log_e_JB[lo : hi + 1] = np.logaddexp(log_lacks_J + log_e_JB[lo : hi + 1], held_JB)
        if k - 1 <= m < n:
            prefix_BM[..., m - 1] = log_e_JB[k - 1]
    return prefix_BM, log_e_JB[k][..., None]


def max_at_k_off_policy(g_BN: FloatArray, log_w_BN: FloatArray, k: int) -> FloatArray:
    """`(1/C(n,k)) sum_i g_(i) w_(i) e_{k-1}(w_(1..i-1))`, [B]; both arrays ordered by reward, ascending."""
    n = g_BN.shape[-1]
    log_mean_BM, _ = log_mean_products(log_w_BN, k)
    zero_B1 = np.full((*g_BN.shape[:-1], 1), 0.0 if k == 1 else -np.inf)
    log_mean_below_BN = np.concatenate([zero_B1, log_mean_BM], axis=-1)
    weighted_BN = g_BN * np.exp(log_w_BN + log_mean_below_BN)
    out_B: FloatArray = weighted_BN @ binomial_ratios(0, n, k - 1, n, k)
    return out_B
