"""Best of k by another score: the sample of highest rank is picked and paid its reward; any 1 <= k <= n.

Best-of-N as it is deployed (arXiv 2412.15287): a verifier, a reward model or public tests rank the samples. The value
of a set I is `f(I)`, the reward of the sample that ranks highest, and the mean over the samples that tie for it. The
estimate has the `loo_minus_one` form of max@k. Without ties, in ascending order of rank,

    a_(i) = (1/C(n,k)) sum_{j<i} (r_(i) - r_(j)) C(j-1, k-2)

because i changes a set of k - 1 others only if it ranks above all, and j was its best. Picking uniformly among tied
samples is the mean of this over the orders of the tied. Let i have t samples at its level, N below it, and let a bar
denote the mean of a level. Sets without another sample of i's level give the sum above with `rbar_(j)` for `r_(j)`,
j <= N. A set with s others of the level changes by `(r_i - their mean) / (s + 1)`, and over all such sets

    sum_{s>=1} C(N, k-1-s) C(t-1, s) (r_i - rbar_-i) / (s+1) = (r_i - rbar) (C(N+t,k) - C(N,k) - t C(N,k-1)) / (t-1).

Both parts are linear in the rewards, so a sum over k costs as much as one k.
"""

from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np

from volley.objectives.combinatorics import FloatArray, IntArray, binomial_ratios
from volley.objectives.maximum import leave_one_out_mean
from volley.objectives.tries import Terms


class Levels(NamedTuple):
    """Where each sample's level of equal rank begins and how many samples it has, [B, n]; ranks sorted ascending."""

    first_BN: IntArray
    size_BN: IntArray

    @classmethod
    def of(cls, rank_BN: FloatArray) -> "Levels":
        n = rank_BN.shape[-1]
        begins_BN = np.diff(rank_BN, axis=-1, prepend=-np.inf) != 0
        first_BN = np.maximum.accumulate(np.where(begins_BN, np.arange(n), 0), axis=-1)
        ends_BN = np.concatenate([begins_BN[:, 1:], np.ones((len(rank_BN), 1), dtype=bool)], axis=-1)
        backwards_BN = np.where(ends_BN, np.arange(n), n)[:, ::-1]
        last_BN = np.minimum.accumulate(backwards_BN, axis=-1)[:, ::-1]
        return cls(first_BN, last_BN - first_BN + 1)

    def means(self, r_BN: FloatArray) -> FloatArray:
        """The mean reward of each sample's level."""
        rows, n = r_BN.shape
        place_BN = np.arange(rows)[:, None] * n + self.first_BN
        base_BN = np.take_along_axis(r_BN, self.first_BN, axis=-1)  # so that equal rewards have exactly their mean
        above_BN = np.bincount(place_BN.reshape(-1), (r_BN - base_BN).reshape(-1), rows * n)[place_BN]
        mean_BN: FloatArray = base_BN + above_BN / self.size_BN
        return mean_BN


def best_of_k_sorted(r_BN: FloatArray, rank_BN: FloatArray, k: int) -> FloatArray:
    """The unbiased estimate of each group, [B]; samples sorted by ascending rank."""
    n = r_BN.shape[-1]
    return Levels.of(rank_BN).means(r_BN) @ binomial_ratios(0, n, k - 1, n, k)


def best_of_k_advantages(r_BN: FloatArray, rank_BN: FloatArray, terms: Terms) -> FloatArray:
    """The advantages of `sum_k w_k best-of-k`, [B, n]; samples sorted by ascending rank."""
    n = r_BN.shape[-1]
    r_BN = r_BN - r_BN.min(axis=-1, keepdims=True)  # equal rewards then give exact zeros
    levels = Levels.of(rank_BN)
    mean_BN = levels.means(r_BN)
    below_M, best_N = np.zeros(n), np.zeros(n)
    for k, weight in terms:
        if k > 1:
            below_M += weight * binomial_ratios(0, n, k - 1, n, k)  # sets of companions below, by N
            best_N += weight * binomial_ratios(0, n, k - 2, n, k)  # of them, those whose best is j
    paid_BN = np.zeros_like(r_BN)
    np.cumsum((mean_BN * best_N)[:, :-1], axis=-1, out=paid_BN[:, 1:])
    a_BN = r_BN * below_M[levels.first_BN] - np.take_along_axis(paid_BN, levels.first_BN, axis=-1)
    a_BN += (r_BN - mean_BN) * _tied_shares(levels, terms)
    for k, weight in terms:
        if k == 1:
            a_BN += weight * leave_one_out_mean(r_BN)
    return a_BN


def _tied_shares(levels: Levels, terms: Terms) -> FloatArray:
    """The factor of `r_i - rbar` for each sample, [B, n]; 0 for a sample that ties with no other."""
    n = levels.size_BN.shape[-1]
    shares_BN = np.zeros(levels.size_BN.shape)
    tied_BN = levels.size_BN > 1
    places, which = np.unique((levels.first_BN * (n + 1) + levels.size_BN)[tied_BN], return_inverse=True)
    if places.size:
        shares_BN[tied_BN] = np.array([_tied_share(n, *divmod(int(place), n + 1), terms) for place in places])[which]
    return shares_BN


@lru_cache(maxsize=2**16)
def _tied_share(n: int, below: int, tied: int, terms: Terms) -> float:
    """`sum_k w_k (C(N+t,k) - C(N,k) - t C(N,k-1)) / ((t-1) C(n,k))` over k >= 2, for t >= 2."""
    sets = ((k, weight, comb(below + tied, k) - comb(below, k) - tied * comb(below, k - 1)) for k, weight in terms)
    return sum(weight * (count / comb(n, k)) for k, weight, count in sets if k > 1) / (tied - 1)
