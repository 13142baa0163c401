"""maj@k: the reward of the most voted answer among k samples, uniform over tied answers; any 1 <= k <= n.

Nothing here enumerates subsets. A vote depends on a group only through its *profile*: the count `c_a` and the
reward `r_a` of each distinct answer. Drawing k of the n samples without replacement gives multivariate
hypergeometric counts, and these are independent binomials conditioned on their total. So the chance that answer
b has t votes and no other answer more is a coefficient of a product of one polynomial per answer,

    [z^k]  P(c_b, t) z^t  prod_{a != b} ( sum_{x<t} P(c_a, x) z^x + u P(c_a, t) z^t )

where `u` counts the ties. A tie of s + 1 answers divides by s + 1 = 1 / int_0^1 u^s du: the integral is taken by
Gauss-Legendre quadrature, which is exact for polynomials. Every term is non-negative.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from volley.objectives.combinatorics import FloatArray, IntArray

_CHUNK_BYTES = 32 * 2**20


class Profiles(NamedTuple):
    """Distinct vote profiles of a batch; answers in a profile are ordered by count, largest first.

    counts_GA, rewards_GA: [profiles, answers], zero-padded. profile_B: the profile of each group.
    slot_BN: the column of each sample's answer in its profile.
    """

    counts_GA: IntArray
    rewards_GA: FloatArray
    profile_B: IntArray
    slot_BN: IntArray


def vote_profiles(answers_BN: IntArray, g_BN: FloatArray) -> Profiles:
    """Reduce a batch of groups to its distinct vote profiles.

    Raises:
        ValueError: two samples of a group share an answer and differ in reward.
    """
    B, n = g_BN.shape
    order_BN = np.argsort(answers_BN, axis=-1)
    sorted_BN = np.take_along_axis(answers_BN, order_BN, axis=-1)
    new_BN = np.diff(sorted_BN, axis=-1, prepend=sorted_BN[:, :1]) != 0
    slot_BN = np.empty((B, n), dtype=np.int64)
    np.put_along_axis(slot_BN, order_BN, np.cumsum(new_BN, axis=-1), axis=-1)
    rows_B1 = np.arange(B)[:, None]
    width = int(slot_BN.max()) + 1
    counts_BA = np.zeros((B, width), dtype=np.int64)
    np.add.at(counts_BA, (rows_B1, slot_BN), 1)
    rewards_BA = np.zeros((B, width))
    rewards_BA[rows_B1, slot_BN] = g_BN
    if (rewards_BA[rows_B1, slot_BN] != g_BN).any():
        raise ValueError(
            "maj_at_k scores answers, and samples of one group share an answer but not a reward; "
            "give such samples different answer ids, or keep format and length terms out of the reward"
        )
    rank_BA = np.lexsort((rewards_BA, -counts_BA), axis=-1)
    inverse_BA = np.argsort(rank_BA, axis=-1)
    keyed_BX = np.concatenate(
        [np.take_along_axis(counts_BA, rank_BA, -1).astype(np.float64), np.take_along_axis(rewards_BA, rank_BA, -1)],
        axis=-1,
    )
    unique_GX, profile_B = np.unique(keyed_BX, axis=0, return_inverse=True)
    return Profiles(
        counts_GA=unique_GX[:, :width].astype(np.int64),
        rewards_GA=unique_GX[:, width:],
        profile_B=profile_B.reshape(-1),
        slot_BN=np.take_along_axis(inverse_BA, slot_BN, axis=-1),
    )


def maj_at_k_profiles(profiles: Profiles, k: int) -> FloatArray:
    """The unbiased maj@k estimate of each profile, [G]."""
    n = int(profiles.counts_GA[0].sum())
    P_CX = _binomials(n, k)
    value_G = np.empty(len(profiles.counts_GA))
    for rows, A in _chunks(profiles.counts_GA, k):
        counts_GA, r_GA = profiles.counts_GA[rows, :A], profiles.rewards_GA[rows, :A]
        lowest_G = r_GA.min(axis=-1, where=counts_GA > 0, initial=np.inf)  # equal rewards then come out exact
        marks_1GA = np.where(counts_GA > 0, r_GA - lowest_G[:, None], 0.0)[None]
        total_G = np.zeros(len(rows))
        for votes in range(-(-k // A), min(k, int(counts_GA.max())) + 1):
            u_Q, weight_Q = _unit_quadrature(min(k // votes, A) - 1)
            polys = _one(len(marks_1GA), len(rows), len(u_Q), k - votes)
            for a in range(A):
                polys = _times(polys, P_CX[counts_GA[:, a]], marks_1GA[..., a], votes, u_Q)
            total_G += polys[1, :, :, -1] @ weight_Q
        value_G[rows] = lowest_G + total_G / P_CX[n, k]
    return value_G


def loo_minus_one_profiles(profiles: Profiles, k: int) -> FloatArray:
    """`(1/C(n,k)) sum_{I: i in I} (f(I) - f(I without i))` for a sample of each answer, [G, A]; needs k >= 2.

    Adding a sample of answer a to a set J of k - 1 others changes the vote only if, with t the top count of J,
    a is tied at t in J (it then wins alone) or stands at t - 1 (it then joins the tie). With s answers tied in J
    the change is `sum_b (r_a - r_b)` over the tied b, divided by s, or by s (s + 1). Splitting
    `(r_a - r_b) (hi - lo) = (r_a - lo) (hi - r_b) - (hi - r_a) (r_b - lo)` leaves no cancellation on two rewards.
    """
    n = int(profiles.counts_GA[0].sum())
    out_GA = np.zeros(profiles.rewards_GA.shape)
    P_CX = _binomials(n - 1, k - 1)
    for rows, A in _chunks(profiles.counts_GA, k):
        counts_GA, r_GA = profiles.counts_GA[rows, :A], profiles.rewards_GA[rows, :A]
        held_GA = counts_GA > 0
        lowest_G1 = r_GA.min(axis=-1, where=held_GA, initial=np.inf, keepdims=True)
        highest_G1 = r_GA.max(axis=-1, where=held_GA, initial=-np.inf, keepdims=True)
        above_GA = np.where(held_GA, r_GA - lowest_G1, 0.0)
        below_GA = np.where(held_GA, highest_G1 - r_GA, 0.0)
        marks_CGA = np.stack([above_GA, below_GA])
        change_GA = np.zeros(r_GA.shape)
        for votes in range(-(-(k - 1) // A), min(k // 2, int(counts_GA.max())) + 1):
            beside_CGA = _beside(counts_GA, marks_CGA, votes, k, P_CX)
            change_GA += above_GA * beside_CGA[1] - below_GA * beside_CGA[0]
        spread_G1 = highest_G1 - lowest_G1
        share_GA = change_GA / (P_CX[n - 1, k - 1] * np.where(spread_G1 > 0, spread_G1, 1.0))
        out_GA[rows, :A] = share_GA * (k / n)
    return out_GA


def _beside(counts_GA: IntArray, marks_CGA: FloatArray, votes: int, k: int, P_CX: FloatArray) -> FloatArray:
    """For each answer a, the weight of the sets J whose vote a sample of a changes, at top count `votes`, with
    each rival b tied at the top counted by its mark; [C, G, A].

    Leave-one-out products come from products of the answers before a and after a.
    """
    C, G, A = marks_CGA.shape
    top_degree = k - 2 * votes  # what the other answers hold when a stands at votes - 1; one less when a is tied
    u_Q, weight_Q = _unit_quadrature(min(top_degree // votes, max(A - 2, 0)) + 1)
    chances = [P_CX[counts_GA[:, a]] for a in range(A)]
    after = [_one(C, G, len(u_Q), top_degree)]
    for a in range(A - 1, 0, -1):
        after.append(_times(after[-1], chances[a], marks_CGA[..., a], votes, u_Q))
    before = _one(C, G, len(u_Q), top_degree)
    out_CGA = np.zeros((C, G, A))
    for a in range(A):
        rest = after.pop()
        own_GX = P_CX[np.maximum(counts_GA[:, a] - 1, 0)]
        joins_CGQ = _coefficient(before, rest, top_degree) * (1 - u_Q) * own_GX[:, votes - 1, None]
        wins_CGQ = _coefficient(before, rest, top_degree - 1) * u_Q * own_GX[:, votes, None]
        out_CGA[..., a] = (joins_CGQ + wins_CGQ) @ weight_Q
        before = _times(before, chances[a], marks_CGA[..., a], votes, u_Q)
    return out_CGA


def _one(marks: int, groups: int, nodes: int, degree: int) -> FloatArray:
    """The empty product, [1 + marks, groups, nodes, degree + 1]: channel 0 plain, the others marked."""
    polys = np.zeros((1 + marks, groups, nodes, degree + 1))
    polys[0, ..., 0] = 1.0
    return polys


def _times(polys: FloatArray, chance_GX: FloatArray, marks_CG: FloatArray, votes: int, u_Q: FloatArray) -> FloatArray:
    """Multiply by the polynomial of one answer, truncated at the degree of `polys`.

    Channel c > 0 follows the product rule: it sums, over the answers so far, the product in which that answer
    stands at the top with its mark. Its factor z^votes is left out.
    """
    size = polys.shape[-1]
    chance_XG11 = chance_GX.T[..., None, None]
    out: FloatArray = polys * chance_XG11[0]
    for x in range(1, min(votes, size)):
        out[..., x:] += polys[..., :-x] * chance_XG11[x]
    if votes < size:
        out[..., votes:] += polys[..., :-votes] * (chance_XG11[votes] * u_Q[:, None])
    out[1:] += polys[0] * (marks_CG[..., None, None] * chance_XG11[votes])
    return out


def _coefficient(before: FloatArray, after: FloatArray, degree: int) -> FloatArray:
    """The marked channels of the product of two stacks at one degree, [C, G, nodes]."""
    if degree < 0:
        return np.zeros((len(before) - 1, *before.shape[1:3]))
    left, right = before[..., : degree + 1], after[..., degree::-1]
    out_CGQ: FloatArray = np.einsum("cgqd,gqd->cgq", left[1:], right[0]) + np.einsum(
        "gqd,cgqd->cgq", left[0], right[1:]
    )
    return out_CGQ


def _chunks(counts_GA: IntArray, k: int) -> Iterator[tuple[IntArray, int]]:
    """Rows of like numbers of answers, few enough for the working set, with the answers they have at most."""
    answers_G = (counts_GA > 0).sum(axis=-1)
    order_G = np.argsort(answers_G, kind="stable")
    start = 0
    while start < len(order_G):
        A = int(answers_G[order_G[start]])
        row_bytes = 8 * 3 * (A + 2) * (min(k, A) // 2 + 1) * (k + 1)
        stop = start + max(1, _CHUNK_BYTES // row_bytes)
        stop = min(stop, start + int((answers_G[order_G[start:]] <= A + A // 4).sum()))
        yield order_G[start:stop], int(answers_G[order_G[stop - 1]])
        start = stop


@lru_cache(maxsize=64)
def _binomials(n: int, draws: int) -> FloatArray:
    """`P[c, x]`: the chance of x successes in c trials of chance draws/n, for c = 0 .. n + 1; [n + 2, draws + 1]."""
    p = draws / n
    P_CX = np.zeros((n + 2, draws + 1))
    P_CX[0, 0] = 1.0
    for c in range(1, n + 2):
        P_CX[c] = (1 - p) * P_CX[c - 1]
        P_CX[c, 1:] += p * P_CX[c - 1, :-1]
    P_CX.flags.writeable = False
    return P_CX


@lru_cache(maxsize=64)
def _unit_quadrature(degree: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights on [0, 1] that integrate polynomials up to this degree exactly."""
    nodes, weights = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return (nodes + 1) / 2, weights / 2
