"""Objectives without sorting or sets: softmax, analytic pass@k, MaxRL, risk-sensitive; and focal weights of groups.

Each of the first four takes rewards `g_BN` [B, n], in any order, and returns advantages of that shape. The last three
of them are per-sample advantages exactly as published, not parts of a sum over sets, so they do not shrink as 1/n.
"""

import numpy as np

from volley.objectives.combinatorics import BoolArray, FloatArray, binomial_ratios


def softmax_leave_one_out(g_BN: FloatArray, beta: float) -> FloatArray:
    """`f(y) - f(y_-i)` for `f = sum_i p_i g_i`, `p = softmax(beta g)` (arXiv 2503.19595, appendix B.2).

    Since `f = p_i g_i + (1 - p_i) f_-i`, this is `p_i (g_i - f_-i)`. Sums without i come from running
    log-sums on both sides, so a sample that holds nearly all of the softmax weight loses nothing.
    """
    logits_BN = beta * g_BN
    above_min_BN: FloatArray = g_BN - g_BN.min(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_value_BN = np.log(above_min_BN)
    log_others_BN = _log_sum_without(logits_BN)
    others_BN: FloatArray = np.exp(_log_sum_without(logits_BN + log_value_BN) - log_others_BN)
    log_all_BN = np.logaddexp(log_others_BN, logits_BN)
    share_BN: FloatArray = np.exp(logits_BN - log_all_BN)
    return share_BN * (above_min_BN - others_BN)


def _log_sum_without(x_BN: FloatArray) -> FloatArray:
    """`log sum_{j != i} exp(x_j)` for every i."""
    edge_B1 = np.full((*x_BN.shape[:-1], 1), -np.inf)
    before_BN = np.concatenate([edge_B1, np.logaddexp.accumulate(x_BN[..., :-1], axis=-1)], axis=-1)
    reverse_BN = np.logaddexp.accumulate(x_BN[..., :0:-1], axis=-1)[..., ::-1]
    after_BN = np.concatenate([reverse_BN, edge_B1], axis=-1)
    without_BN: FloatArray = np.logaddexp(before_BN, after_BN)
    return without_BN


def pass_at_k_analytic(g_BN: FloatArray, k: int) -> FloatArray:
    """The group-normalised pass@k advantage of arXiv 2508.10751 for 0/1 rewards; zero where its sd is zero.

    Raises:
        ValueError: a reward other than 0 or 1.
    """
    if not np.isin(g_BN, (0.0, 1.0)).all():
        raise ValueError("pass_at_k_analytic needs rewards 0 or 1; map the rewards, or write kind: max_at_k")
    n = g_BN.shape[-1]
    wrong_B1 = (n - g_BN.sum(axis=-1, keepdims=True)).astype(np.int64)
    all_wrong_B1 = binomial_ratios(0, n + 1, k, n, k)[wrong_B1]
    all_wrong_with_i_B1 = binomial_ratios(-1, n, k - 1, n - 1, k - 1)[wrong_B1]
    sd_B1 = np.sqrt(all_wrong_B1 * (1 - all_wrong_B1))
    shape_BN = np.where(g_BN == 1, all_wrong_B1, all_wrong_B1 - all_wrong_with_i_B1)
    out_BN: FloatArray = np.divide(shape_BN, sd_B1, out=np.zeros_like(g_BN), where=sd_B1 > 0)
    return out_BN


def maxrl(g_BN: FloatArray) -> FloatArray:
    """`(g_i - mean) / mean` (arXiv 2602.02710); zero for a group whose rewards are all zero.

    Raises:
        ValueError: a negative reward.
    """
    if (g_BN < 0).any():
        raise ValueError("maxrl needs rewards of 0 or more; add a constant, for example map -1/+1 to 0/1")
    mean_B1 = g_BN.mean(axis=-1, keepdims=True)
    above_min_BN = g_BN - g_BN.min(axis=-1, keepdims=True)
    centred_BN = above_min_BN - above_min_BN.mean(axis=-1, keepdims=True)
    out_BN: FloatArray = np.divide(centred_BN, mean_B1, out=np.zeros_like(g_BN), where=mean_B1 > 0)
    return out_BN


def risk_sensitive(g_BN: FloatArray, beta: float) -> FloatArray:
    """`(exp(beta g_i) / mean exp(beta g) - 1) / beta` (arXiv 2509.24261), exact for tiny and huge `beta g`."""
    scaled_BN = beta * g_BN
    scaled_BN -= scaled_BN.max(axis=-1, keepdims=True)
    log_mean_B1 = np.log1p(np.expm1(scaled_BN).mean(axis=-1, keepdims=True))
    out_BN: FloatArray = np.expm1(scaled_BN - log_mean_B1) / beta
    return out_BN


def focal_weights(g_BN: FloatArray, valid_BN: BoolArray | None, gamma: float) -> FloatArray:
    """`(1 - solve rate)^gamma` of each group (arXiv 2602.06717), [B]; the solve rate is the mean valid reward.

    Raises:
        ValueError: a reward outside 0..1, more than rounding explains.
    """
    used_BN = np.ones(g_BN.shape, dtype=bool) if valid_BN is None else valid_BN
    g_BN = np.where(used_BN, g_BN, 0.0)
    if (np.abs(g_BN - 0.5) > 0.5 + 1e-6).any():
        raise ValueError("focal needs rewards from 0 to 1, whose mean is a solve rate: scale them, or write focal: 0")
    rate_B = g_BN.sum(axis=-1) / np.maximum(used_BN.sum(axis=-1), 1)
    weight_B: FloatArray = (1 - np.clip(rate_B, 0.0, 1.0)) ** gamma
    return weight_B
