"""Off-policy maj@k: exact importance weights of the other voters, without enumerating subsets.

As for max@k, the sample's own weight is left to the policy update. Let each other sample j join a set J with chance
`p_j = x w_j / (1 + x w_j)`, independently. Given that k - 1 samples join, J is drawn in proportion to its weight
`prod_{j in J} w_j`. The binomial counts of majority.py thus become sums of unequal Bernoulli variables, and the rest of
the method is unchanged. The tilt x makes k - 1 a likely number: nothing overflows, and no term that counts underflows.
"""

import numpy as np

from volley.objectives.combinatorics import BoolArray, FloatArray, IntArray, log_binomials
from volley.objectives.majority import Answers, chunks, pivotal_counts, reward_marks, vote_changes


def loo_minus_one_off_policy(answers: Answers, log_w_BN: FloatArray, log_factor_B1: FloatArray, k: int) -> FloatArray:
    """`(1/C(n,k)) sum_{I: i in I} (prod_{j in I, j != i} w_j) (f(I) - f(I without i))` times a factor; k >= 2."""
    B, n = log_w_BN.shape
    out_BN = np.zeros((B, n))
    for rows, A in chunks(answers.counts_BA, k, n):
        counts_GA, slot_GN = answers.counts_BA[rows, :A], answers.slot_BN[rows]
        marks = reward_marks(counts_GA, answers.rewards_BA[rows, :A])
        log_tilt_G1 = tilt(log_w_BN[rows], k - 1)
        log_odds_GN = log_w_BN[rows] + log_tilt_G1
        log_absent_GN = -np.logaddexp(0.0, log_odds_GN)
        chance_GAX, own_GNX = _bernoulli_counts(slot_GN, log_odds_GN, log_absent_GN, A, k // 2)
        chances = [chance_GAX[:, a] for a in range(A)]
        pools = _pools(chances, k)
        change_GN = np.zeros((len(rows), n))
        for votes, high in pivotal_counts(counts_GA, k):
            joins_GA, wins_GA = np.zeros((2, *counts_GA.shape))
            joins_GA[:, :high], wins_GA[:, :high] = vote_changes(chances[:high], pools[high], marks, votes, k)
            change_GN += np.take_along_axis(joins_GA, slot_GN, -1) * own_GNX[..., votes - 1]
            change_GN += np.take_along_axis(wins_GA, slot_GN, -1) * own_GNX[..., votes]
        log_scale_GN = log_absent_GN - log_absent_GN.sum(axis=-1, keepdims=True) - (k - 1) * log_tilt_G1
        scale_GN = np.exp(log_scale_GN + log_factor_B1[rows] - log_binomials(n, np.array(k)))
        out_BN[rows] = np.multiply(change_GN, scale_GN, out=np.zeros_like(change_GN), where=change_GN != 0)
    return out_BN


def tilt(log_w_GN: FloatArray, draws: int) -> FloatArray:
    """`log x` such that `sum_j x w_j / (1 + x w_j)` is close to the number of draws, [G, 1], by bisection."""
    n = log_w_GN.shape[-1]
    weighty_GN = np.isfinite(log_w_GN)
    target_G1 = np.minimum(draws * n / (n - 1), weighty_GN.sum(axis=-1, keepdims=True) - 0.5)
    low_G1: FloatArray = -np.max(log_w_GN, axis=-1, keepdims=True, where=weighty_GN, initial=-700.0) - np.log(n + 1)
    high_G1: FloatArray = -np.min(log_w_GN, axis=-1, keepdims=True, where=weighty_GN, initial=700.0) + np.log(2 * n)
    for _ in range(50):
        middle_G1 = (low_G1 + high_G1) / 2
        expected_G1 = np.exp(-np.logaddexp(0.0, -(middle_G1 + log_w_GN))).sum(axis=-1, keepdims=True)
        low_G1 = np.where(expected_G1 < target_G1, middle_G1, low_G1)
        high_G1 = np.where(expected_G1 < target_G1, high_G1, middle_G1)
    return low_G1


def _bernoulli_counts(
    slot_GN: IntArray, log_odds_GN: FloatArray, log_absent_GN: FloatArray, A: int, top: int
) -> tuple[FloatArray, FloatArray]:
    """Chances that x = 0 .. top samples of an answer take part.

    Of each answer, [G, A, top + 1], and of each sample's answer without that sample, [G, n, top + 1].
    """
    G, n = slot_GN.shape
    chance_GAX, own_GNX = np.zeros((G, A, top + 1)), np.zeros((G, n, top + 1))
    chance_GAX[..., 0] = own_GNX[..., 0] = 1.0
    present_GN, absent_GN = np.exp(log_odds_GN + log_absent_GN), np.exp(log_absent_GN)
    for j in range(n):
        p_G11, q_G11 = present_GN[:, j, None, None], absent_GN[:, j, None, None]
        _take_part(chance_GAX, slot_GN[:, j, None] == np.arange(A), p_G11, q_G11)
        _take_part(own_GNX, (slot_GN[:, j, None] == slot_GN) & (np.arange(n) != j), p_G11, q_G11)
    return chance_GAX, own_GNX


def _pools(chances: list[FloatArray], k: int) -> list[FloatArray]:
    """Chances of the total votes of the answers from column a on, for a = 0 .. A, [G, k] each.

    `chances` ends where an answer has more votes than a pooled one can get, so pools are right wherever they are used.
    """
    pool_GX = np.zeros((len(chances[0]), k))
    pool_GX[:, 0] = 1.0
    pools = [pool_GX]
    for chance_GX in reversed(chances):
        wider_GX = pools[-1] * chance_GX[:, :1]
        for x in range(1, min(chance_GX.shape[-1], k)):
            wider_GX[:, x:] += pools[-1][:, :-x] * chance_GX[:, x : x + 1]
        pools.append(wider_GX)
    return pools[::-1]


def _take_part(chance_GRX: FloatArray, concerned_GR: BoolArray, p_G11: FloatArray, q_G11: FloatArray) -> None:
    """Add one sample to the counts that it affects, in place."""
    p_GR1 = np.where(concerned_GR[..., None], p_G11, 0.0)
    q_GR1 = np.where(concerned_GR[..., None], q_G11, 1.0)
    one_more_GRX = chance_GRX[..., :-1] * p_GR1
    chance_GRX *= q_GR1
    chance_GRX[..., 1:] += one_more_GRX
