"""Off-policy best of k by rank: exact importance weights of the other samples of a set, ties included.

As in majority_off_policy.py, let each other sample j join a set J with chance `p_j = x w_j / (1 + x w_j)`: given that
k - 1 samples join, J is drawn in proportion to its weight. Sample i changes J only if none that joins ranks above i.
With s joining at i's level, N below it and R the sum of the joining samples' rewards at that level, the change is

    s = 0:  r_i - f(J)              s > 0:  (r_i - R / s) / (s + 1)

so it takes the chances of each count below and at the level, and at the level the sums of R by count as well.
Samples are sorted by ascending rank. X counts joining samples, 0 .. k - 1.
"""

from typing import NamedTuple

import numpy as np

from volley.objectives.combinatorics import FloatArray, log_binomials
from volley.objectives.majority_off_policy import tilt
from volley.objectives.ranked import Levels

_CHUNK_BYTES = 16 * 2**20


class Counts(NamedTuple):
    """Of some samples: chances that x of them join, and expected rewards of those that do, [G, n, X] each."""

    chance_GNX: FloatArray
    paid_GNX: FloatArray

    def joined_by(self, p_GN: FloatArray, q_GN: FloatArray, r_GN: FloatArray) -> "Counts":
        """With one more sample in each of the n places, of chance p to join and reward r."""
        p_GN1, q_GN1 = p_GN[..., None], q_GN[..., None]
        chance_GNX, paid_GNX = self.chance_GNX * q_GN1, self.paid_GNX * q_GN1
        chance_GNX[..., 1:] += self.chance_GNX[..., :-1] * p_GN1
        paid_GNX[..., 1:] += (self.paid_GNX[..., :-1] + self.chance_GNX[..., :-1] * r_GN[..., None]) * p_GN1
        return Counts(chance_GNX, paid_GNX)


def best_of_k_off_policy(
    r_BN: FloatArray, rank_BN: FloatArray, log_w_BN: FloatArray, log_factor_B1: FloatArray, k: int
) -> FloatArray:
    """`(1/C(n,k)) sum_{I: i in I} (prod_{j in I, j != i} w_j) (f(I) - f(I without i))` times a factor; k >= 2."""
    n = r_BN.shape[-1]
    r_BN = r_BN - r_BN.min(axis=-1, keepdims=True)
    out_BN = np.empty_like(r_BN)
    step = max(1, _CHUNK_BYTES // (8 * 6 * n * k))
    for start in range(0, len(out_BN), step):
        rows = slice(start, start + step)
        out_BN[rows] = _advantages(r_BN[rows], rank_BN[rows], log_w_BN[rows], log_factor_B1[rows], k)
    return out_BN


def _advantages(
    r_GN: FloatArray, rank_GN: FloatArray, log_w_GN: FloatArray, log_factor_G1: FloatArray, k: int
) -> FloatArray:
    n, draws = r_GN.shape[-1], k - 1
    levels = Levels.of(rank_GN)
    log_tilt_G1 = tilt(log_w_GN, draws)
    log_odds_GN = log_w_GN + log_tilt_G1
    log_absent_GN = -np.logaddexp(0.0, log_odds_GN)
    p_GN, q_GN = np.exp(log_odds_GN + log_absent_GN), np.exp(log_absent_GN)
    below_GNX = _below(p_GN, q_GN, levels, draws)
    others = _others_of_level(p_GN, q_GN, r_GN, levels, draws)
    whole = others.joined_by(p_GN, q_GN, r_GN)

    joint_GNX = below_GNX[..., ::-1]  # the chance that those below fill up to k - 1, by the count at the level
    x_X = np.arange(1, k)
    best_GN = (joint_GNX[..., 1:] * whole.paid_GNX[..., 1:] / x_X).sum(axis=-1)
    of_lower_GN = _value_below(best_GN, log_absent_GN, levels)
    none_at_level_GN = others.chance_GNX[..., 0]
    change_GN = (r_GN * joint_GNX[..., 0] - of_lower_GN) * none_at_level_GN
    tied_GNX = r_GN[..., None] * others.chance_GNX[..., 1:] - others.paid_GNX[..., 1:] / x_X
    change_GN += (joint_GNX[..., 1:] * tied_GNX / (x_X + 1)).sum(axis=-1)

    log_up_to_GN = np.cumsum(log_absent_GN, axis=-1)
    last_GN = levels.first_BN + levels.size_BN - 1
    log_others_GN = np.take_along_axis(log_up_to_GN, last_GN, axis=-1) - log_absent_GN  # below, and others of the level
    log_scale_GN = log_factor_G1 - log_others_GN - draws * log_tilt_G1 - log_binomials(n, np.array(k))
    scale_GN = np.exp(log_scale_GN)
    a_GN: FloatArray = np.multiply(change_GN, scale_GN, out=np.zeros_like(change_GN), where=change_GN != 0)
    return a_GN


def _below(p_GN: FloatArray, q_GN: FloatArray, levels: Levels, draws: int) -> FloatArray:
    """Chances that x of the samples below each sample's level join, [G, n, draws + 1]."""
    G, n = p_GN.shape
    before_GNX = np.zeros((G, n, draws + 1))
    before_GNX[:, 0, 0] = 1.0
    for j in range(n - 1):
        p_G1, q_G1 = p_GN[:, j, None], q_GN[:, j, None]
        before_GNX[:, j + 1] = before_GNX[:, j] * q_G1
        before_GNX[:, j + 1, 1:] += before_GNX[:, j, :-1] * p_G1
    return np.take_along_axis(before_GNX, levels.first_BN[..., None], axis=1)


def _others_of_level(p_GN: FloatArray, q_GN: FloatArray, r_GN: FloatArray, levels: Levels, draws: int) -> Counts:
    """Counts of the samples that tie with each sample, without itself."""
    G, n = p_GN.shape
    chance_GNX = np.zeros((G, n, draws + 1))
    chance_GNX[..., 0] = 1.0
    counts = Counts(chance_GNX, np.zeros_like(chance_GNX))
    for j in np.flatnonzero((levels.size_BN > 1).any(axis=0)):
        ties_GN = (levels.first_BN == levels.first_BN[:, j, None]) & (np.arange(n) != j)
        p_j_GN, q_j_GN = np.where(ties_GN, p_GN[:, j, None], 0.0), np.where(ties_GN, q_GN[:, j, None], 1.0)
        counts = counts.joined_by(p_j_GN, q_j_GN, np.broadcast_to(r_GN[:, j, None], (G, n)))
    return counts


def _value_below(best_GN: FloatArray, log_absent_GN: FloatArray, levels: Levels) -> FloatArray:
    """The expected `f(J)` of sets of k - 1 samples below each sample's level, from the part of each level."""
    n = best_GN.shape[-1]
    last_GN = levels.first_BN + levels.size_BN - 1
    value_G, log_level_G = np.zeros((2, len(best_GN)))
    out_GN = np.empty_like(best_GN)
    for i in range(n):
        out_GN[:, i] = value_G
        log_level_G = log_level_G + log_absent_GN[:, i]
        ends_G = last_GN[:, i] == i
        value_G = np.where(ends_G, value_G * np.exp(log_level_G) + best_GN[:, i], value_G)
        log_level_G = np.where(ends_G, 0.0, log_level_G)
    return out_GN
