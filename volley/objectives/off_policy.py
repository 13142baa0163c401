"""Off-policy sums of max@k: exact importance weights of the other samples of a set, in O(n k) for the largest k.

A sample's own weight is left to the policy update (its ratio), so the returned advantage `A_i = a_i / w_i`
depends on the other samples' weights only. Order the group by reward: a set without i whose best is below
`g_(m+1)` lies among the m smallest, so with `e_j` the elementary symmetric polynomial of degree j

    A_(i) = sum_{m<i} (g_(m+1) - g_(m)) e_{k-1}(w_(1..m)) / C(n, k)
          = sum_{m<i} (g_(m+1) - g_(m)) C(m, k-1) / C(n, k) * E_{k-1}(w_(1..m)),    E_j(w_1..m) = e_j / C(m, j)

That is the on-policy estimate with every term multiplied by the mean weight of its sets. All terms are
non-negative and every recursion below is a convex combination, so log space loses none of them.
Both arguments of each function, rewards `g_BN` and log-weights `log_w_BN`, are ordered by reward, ascending.
"""

from collections.abc import Iterator

import numpy as np

from volley.objectives.combinatorics import FloatArray, IntArray, binomial_ratios, log_binomials
from volley.objectives.maximum import leave_one_out_mean
from volley.objectives.spec import Baseline, CompanionWeights
from volley.objectives.tries import Terms


def max_at_k_off_policy(g_BN: FloatArray, log_w_BN: FloatArray, k: int) -> FloatArray:
    """`(1/C(n,k)) sum_{|I|=k} (prod_{j in I} w_j) max_I g = sum_i g_(i) w_(i) e_{k-1}(w_(1..i-1)) / C(n,k)`, [B]."""
    n = g_BN.shape[-1]
    share_BN = g_BN * binomial_ratios(0, n, k - 1, n, k)
    out_B: FloatArray = _times(share_BN, np.exp(log_w_BN + _log_mean_products(log_w_BN, k))).sum(axis=-1)
    return out_B


def exact_advantages(
    g_BN: FloatArray, log_w_BN: FloatArray, terms: Terms, baseline: Baseline, companion_weights: CompanionWeights
) -> FloatArray:
    """`A_i = a_i / w_i` of `sum_k w_k max@k`, self-normalised on request; `loo` and `subset_loo` need k <= n - 1.

    Unbiased unless self-normalised, once the sample's own ratio multiplies it, whatever the baseline: each baseline is
    an off-policy estimate that the other samples alone make. A try without companions (k = 1) needs no weights: it is
    REINFORCE leave-one-out.
    """
    of_sets = tuple((k, weight) for k, weight in terms if k > 1)
    if not of_sets:
        return sum(weight for _, weight in terms) * leave_one_out_mean(g_BN)
    a_BN = _of_sets(g_BN, log_w_BN, of_sets, companion_weights)
    if baseline != "loo_minus_one":
        a_BN += _difference_of_baselines(g_BN, log_w_BN, of_sets, baseline, companion_weights)
    for k, weight in terms:
        if k == 1:
            a_BN += weight * leave_one_out_mean(g_BN)
    return a_BN


def first_order_advantages(g_BN: FloatArray, log_w_BN: FloatArray, terms: Terms) -> FloatArray:
    """`A_i` of the `loo_minus_one` baseline with `prod w_j` taken as `1 + sum (w_j - 1)`; O(n) for each term.

    Where the mean of that expansion over the sets of a gap is negative it is replaced by 0, since a mean weight cannot
    be negative: otherwise companions that the policy has moved away from would turn a solved sample's advantage around.
    """
    n = g_BN.shape[-1]
    mean_excess_BM = np.cumsum(np.expm1(log_w_BN[..., :-1]), axis=-1) / np.arange(1, n)
    share_BM = np.zeros((len(g_BN), n - 1))
    for k, weight in terms:
        if k > 1:
            mean_weight_BM = np.maximum(1 + (k - 1) * mean_excess_BM, 0.0)
            share_BM += weight * binomial_ratios(1, n, k - 1, n, k) * mean_weight_BM
    a_BN = _sum_of_gaps(g_BN, share_BM)
    for k, weight in terms:
        if k == 1:
            a_BN += weight * leave_one_out_mean(g_BN)
    return a_BN


def common_scale(log_w_BN: FloatArray, k: int, companion_weights: CompanionWeights) -> tuple[FloatArray, FloatArray]:
    """Log-weights for the exact estimate, and the log of the factor it needs: A_i has one weight less than a_i."""
    if companion_weights != "self_normalised":
        return log_w_BN, np.zeros((len(log_w_BN), 1))
    log_w_BN, log_unit_B1 = unit_weights(log_w_BN, k)
    return log_w_BN, -log_unit_B1


def unit_weights(log_w_BN: FloatArray, k: int) -> tuple[FloatArray, FloatArray]:
    """Log-weights with a common factor taken out such that `e_k(w) = C(n, k)`, and the log of that factor, [B, 1].

    This is self-normalisation: the mean weight of a k-set becomes 1. It happens before anything is exponentiated, so
    nothing overflows. A group whose k-sets all have weight zero keeps its weights.
    """
    *_, log_e_JB = _log_means(log_w_BN, k)
    log_all_B1 = log_e_JB[k][:, None]
    log_unit_B1: FloatArray = np.where(np.isfinite(log_all_B1), log_all_B1 / k, 0.0)
    return log_w_BN - log_unit_B1, log_unit_B1


def _of_sets(g_BN: FloatArray, log_w_BN: FloatArray, terms: Terms, companion_weights: CompanionWeights) -> FloatArray:
    """The `loo_minus_one` part, for terms with k >= 2: one recursion yields the mean weights for every k."""
    n = g_BN.shape[-1]
    k_K = np.array([k for k, _ in terms])
    ratio_KM = np.stack([weight * binomial_ratios(1, n, k - 1, n, k) for k, weight in terms])
    log_scale_KB = np.zeros((len(terms), 1))
    if companion_weights == "self_normalised":
        *_, log_e_JB = _log_means(log_w_BN, int(k_K[-1]), int(k_K[0]))
        log_scale_KB = -np.where(np.isfinite(log_e_JB[k_K]), log_e_JB[k_K], 0.0)
    share_BM = np.empty((len(g_BN), n - 1))
    means = _log_means(log_w_BN, int(k_K[-1]) - 1, int(k_K[0]) - 1)
    next(means)  # of no samples
    for m, log_e_JB in zip(range(n - 1), means, strict=False):
        mean_KB = np.exp(log_e_JB[k_K - 1] + log_scale_KB)
        share_BM[:, m] = _times(np.broadcast_to(ratio_KM[:, m, None], mean_KB.shape), mean_KB).sum(axis=0)
    return _sum_of_gaps(g_BN, share_BM)


def _sum_of_gaps(g_BN: FloatArray, share_BM: FloatArray) -> FloatArray:
    """The gaps below each sample, times the weighted share of sets that each counts."""
    out_BN = np.zeros_like(g_BN)
    np.cumsum(_times(np.diff(g_BN, axis=-1), share_BM), axis=-1, out=out_BN[..., 1:])
    return out_BN


def _times(value_X: FloatArray, weight_X: FloatArray) -> FloatArray:
    """The product, 0 where the value is 0 even if the weight overflowed: it counts no sets, or sets of no reward."""
    return np.multiply(value_X, weight_X, out=np.zeros_like(value_X), where=value_X != 0)


def _log_mean_products(log_w_BN: FloatArray, k: int) -> FloatArray:
    """`log E_{k-1}` of the samples before each one, [B, n]."""
    n = log_w_BN.shape[-1]
    below_BN = np.full(log_w_BN.shape, -np.inf)
    for m, log_e_JB in zip(range(n), _log_means(log_w_BN, k - 1), strict=False):
        below_BN[..., m] = log_e_JB[k - 1]
    return below_BN


def _log_means(log_w_BN: FloatArray, top: int, lowest: int | None = None) -> Iterator[FloatArray]:
    """`log E_j(w_1..m)` as [top + 1, B], one array for each m = 0 .. n, updated in place.

    A j-set of the first m samples lacks or holds sample m, so
    `E_j(1..m) = (1 - j/m) E_j(1..m-1) + (j/m) w_m E_{j-1}(1..m-1)`.
    Degrees from `lowest` (by default `top`) to `top` are complete in the end: those that cannot reach `lowest` with the
    remaining samples are no longer updated.
    """
    lowest = top if lowest is None else lowest
    rows, n = log_w_BN.shape
    log_e_JB = np.full((top + 1, rows), -np.inf)
    log_e_JB[0] = 0.0
    yield log_e_JB
    for m in range(1, n + 1):
        low, high = max(1, lowest - (n - m)), min(m, top)
        log_lacks_J1, log_holds_J1 = _log_shares(low, high, m)
        held_JB = log_holds_J1 + log_w_BN[:, m - 1] + log_e_JB[low - 1 : high]
        np.logaddexp(log_lacks_J1 + log_e_JB[low : high + 1], held_JB, out=log_e_JB[low : high + 1])
        yield log_e_JB


def _log_shares(low: int, high: int, m: int) -> tuple[FloatArray, FloatArray]:
    """`log(1 - j/m)` and `log(j/m)` for j = low .. high, as columns."""
    share_J1 = np.arange(low, high + 1)[:, None] / m
    with np.errstate(divide="ignore"):
        return np.log1p(-share_J1), np.log(share_J1)


def _difference_of_baselines(
    g_BN: FloatArray, log_w_BN: FloatArray, terms: Terms, baseline: Baseline, companion_weights: CompanionWeights
) -> FloatArray:
    """What another baseline than `loo_minus_one` adds to the advantages, for terms with k >= 2."""
    n, top = g_BN.shape[-1], terms[-1][0]
    log_plus_KB = np.full((top + 1, len(g_BN)), -np.inf)  # coefficients of the estimates of g_-i, by the size of sets
    log_minus_KB = log_plus_KB.copy()
    log_e_KB = None
    if companion_weights == "self_normalised":
        *_, log_e_KB = _log_means(log_w_BN, top, terms[0][0])
    for k, weight in terms:
        log_mean_B = np.zeros(len(g_BN)) if log_e_KB is None else np.where(np.isfinite(log_e_KB[k]), log_e_KB[k], 0.0)
        log_plus_KB[k - 1] = np.log(weight * k / n) - log_mean_B
        if baseline != "none":
            log_minus_KB[k] = np.log(weight * k / (n - 1 if baseline == "loo" else n)) - log_mean_B * (k + 1) / k
    out_BN = _max_at_k_without(g_BN, log_w_BN, log_plus_KB[:top])
    return out_BN if baseline == "none" else out_BN - _max_at_k_without(g_BN, log_w_BN, log_minus_KB)


def _max_at_k_without(g_BN: FloatArray, log_w_BN: FloatArray, log_c_KB: FloatArray) -> FloatArray:
    """`sum_k c_k` times the off-policy max@k estimate of each `g_-i`, [B, n]; O(n k) for all k <= n - 1 together.

    The estimate is linear in the rewards once their order is known, so positive and negative ones are two sums without
    cancellation.
    """
    with np.errstate(divide="ignore"):
        out_BN = _best_without(np.log(np.maximum(g_BN, 0.0)), log_w_BN, log_c_KB)
        if (g_BN < 0).any():
            out_BN -= _best_without(np.log(np.maximum(-g_BN, 0.0)), log_w_BN, log_c_KB)
    return out_BN


def _best_without(log_v_BN: FloatArray, log_w_BN: FloatArray, log_c_KB: FloatArray) -> FloatArray:
    """`sum_k c_k` times the weighted mean, over the k-sets without each sample, of the value v of their last sample.

    A k-set without i takes j samples before i and k - j after it, and its last is after i unless j = k. So the mean
    joins the prefix means `E_j` with the suffix sums, hypergeometrically.
    """
    n, top = log_v_BN.shape[-1], len(log_c_KB) - 1
    sizes_K = np.flatnonzero((log_c_KB > -np.inf).any(axis=-1))
    log_own_BN = log_w_BN + log_v_BN
    log_c_KB = log_c_KB[sizes_K]
    after = _after(log_own_BN, log_w_BN, log_c_KB, sizes_K)
    log_before_B = np.full(len(log_v_BN), -np.inf)  # of sets before i
    out_BN = np.empty_like(log_v_BN)
    for i, log_e_JB in zip(range(n), _log_means(log_w_BN, top, int(sizes_K[0])), strict=False):
        low, log_after_JB = after.pop()
        joined_JB = log_e_JB[low : low + len(log_after_JB)] + log_after_JB
        out_BN[:, i] = np.exp(joined_JB).sum(axis=0) + np.exp(log_before_B)
        log_last_K1 = (log_binomials(i, sizes_K - 1) - log_binomials(n - 1, sizes_K))[:, None]
        log_last_B = np.logaddexp.reduce(log_last_K1 + log_c_KB + log_e_JB[sizes_K - 1], axis=0)
        log_before_B = np.logaddexp(log_before_B, log_own_BN[:, i] + log_last_B)
    return out_BN


def _after(
    log_own_BN: FloatArray, log_w_BN: FloatArray, log_c_KB: FloatArray, sizes_K: IntArray
) -> list[tuple[int, FloatArray]]:
    """What the samples after i make of sets that hold j of the i before it, for i = n - 1 .. 0 and all j together.

    With `b_m` the sum of weight times v over the m-sets of the samples after i, `U_i[j] = sum_k c_k C(i,j) b_{k-j} /
    C(n-1,k)`. Sample i is after i - 1, either with others after it or as the last of its set, so

        U_{i-1}[j] = (1 - j/i) U_i[j] + ((j+1)/i) w_i U_i[j+1] + c_{j+1} C(i-1,j) / C(n-1,j+1) w_i v_i

    Returns the lowest j that matters and log U, [j's, B], for each i.
    """
    n, lowest, top = log_w_BN.shape[-1], int(sizes_K[0]), int(sizes_K[-1])
    log_u_JB = np.full((top + 1, len(log_w_BN)), -np.inf)
    log_share_KB = log_c_KB - log_binomials(n - 1, sizes_K)[:, None]
    kept = []
    for i in range(n - 1, -1, -1):
        low = max(0, lowest - (n - 1 - i))
        kept.append((low, log_u_JB[low : min(i, top) + 1].copy()))
        if i == 0:
            break
        low, high = max(0, low - 1), min(i, top)  # for i - 1 the highest j with one more after it is high - 1
        log_lacks_J1, log_holds_J1 = _log_shares(low, min(i - 1, top), i)[0], _log_shares(low + 1, high, i)[1]
        held_JB = log_holds_J1 + log_w_BN[:, i] + log_u_JB[low + 1 : high + 1]
        log_u_JB[low : low + len(log_lacks_J1)] += log_lacks_J1
        np.logaddexp(log_u_JB[low:high], held_JB, out=log_u_JB[low:high])
        last = sizes_K <= i  # C(i - 1, k - 1) is 0 for the others
        last_KB = log_share_KB[last] + log_binomials(i - 1, sizes_K[last] - 1)[:, None] + log_own_BN[:, i]
        log_u_JB[sizes_K[last] - 1] = np.logaddexp(log_u_JB[sizes_K[last] - 1], last_KB)
    return kept
