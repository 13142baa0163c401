"""maj@k: the reward of the answer with the most votes among k samples, a mean over tied answers; any 1 <= k <= n.

Nothing here enumerates subsets. On-policy, a vote depends on a group only through its *profile*: the count `c_a`
and the reward `r_a` of each distinct answer. Drawing without replacement gives multivariate hypergeometric counts,
which are independent binomials conditioned on their total; vote_polynomials.py does the rest.

Adding one sample of answer a to a set J of k - 1 others changes the vote only if, with t the top count of J, a is
tied at t (it then wins alone) or stands at t - 1 (it then joins the tie). With s answers tied in J the change is
`sum_b (r_a - r_b)` over the tied b, divided by s, or by s (s + 1).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from volley.objectives.combinatorics import FloatArray, IntArray
from volley.objectives.vote_polynomials import pivots, top_share

_CHUNK_BYTES = 16 * 2**20


class Answers(NamedTuple):
    """The distinct answers of each group, in order of votes.

    counts_BA, rewards_BA: [B, A], zero-padded. slot_BN: the column of each sample's answer.
    """

    counts_BA: IntArray
    rewards_BA: FloatArray
    slot_BN: IntArray


class Profiles(NamedTuple):
    """The distinct rows of counts and rewards, [G, A], and the row of each group, [B]."""

    counts_GA: IntArray
    rewards_GA: FloatArray
    profile_B: IntArray


def read_answers(answers_BN: IntArray, g_BN: FloatArray) -> Answers:
    """Count the distinct answers of each group; a negative id means no answer and agrees with no other.

    Raises:
        ValueError: two samples of a group share an answer and differ in reward.
    """
    B, n = g_BN.shape
    answers_BN = np.where(answers_BN < 0, -1 - np.arange(n), answers_BN)
    order_BN = np.argsort(answers_BN, axis=-1)
    sorted_BN = np.take_along_axis(answers_BN, order_BN, axis=-1)
    new_BN = np.diff(sorted_BN, axis=-1, prepend=sorted_BN[:, :1]) != 0
    slot_BN = np.empty((B, n), dtype=np.int64)
    np.put_along_axis(slot_BN, order_BN, np.cumsum(new_BN, axis=-1), axis=-1)
    rows_B1 = np.arange(B)[:, None]
    A = int(slot_BN.max()) + 1
    counts_BA = np.zeros((B, A), dtype=np.int64)
    np.add.at(counts_BA, (rows_B1, slot_BN), 1)
    rewards_BA = np.zeros((B, A))
    rewards_BA[rows_B1, slot_BN] = g_BN
    if (rewards_BA[rows_B1, slot_BN] != g_BN).any():
        raise ValueError(
            "maj_at_k scores answers, but samples of one group share an answer and differ in reward; "
            "give such samples different answer ids, or keep format and length terms out of the reward"
        )
    rank_BA = np.lexsort((rewards_BA, -counts_BA), axis=-1)
    return Answers(
        counts_BA=np.take_along_axis(counts_BA, rank_BA, axis=-1),
        rewards_BA=np.take_along_axis(rewards_BA, rank_BA, axis=-1),
        slot_BN=np.take_along_axis(np.argsort(rank_BA, axis=-1), slot_BN, axis=-1),
    )


def vote_profiles(answers: Answers) -> Profiles:
    """Reduce a batch of groups to its distinct vote profiles."""
    A = answers.counts_BA.shape[-1]
    key_BX = np.concatenate([answers.counts_BA.astype(np.float64), answers.rewards_BA], axis=-1)
    unique_GX, profile_B = np.unique(key_BX, axis=0, return_inverse=True)
    return Profiles(unique_GX[:, :A].astype(np.int64), unique_GX[:, A:], profile_B.reshape(-1))


def maj_at_k_profiles(profiles: Profiles, k: int) -> FloatArray:
    """The unbiased maj@k estimate of each profile, [G]."""
    n = int(profiles.counts_GA[0].sum())
    P_CX = _binomials(n, k)
    value_G = np.empty(len(profiles.counts_GA))
    for rows, A in chunks(profiles.counts_GA, k):
        counts_GA = profiles.counts_GA[rows, :A]
        marks = reward_marks(counts_GA, profiles.rewards_GA[rows, :A])
        chances = [P_CX[counts_GA[:, a]] for a in range(A)]
        above_G = np.zeros(len(rows))
        for votes in range(-(-k // A), min(k, int(counts_GA.max())) + 1):
            high = contenders(counts_GA, votes)
            pool_GX = P_CX[counts_GA[:, high:].sum(axis=-1)]
            above_G += top_share(chances[:high], pool_GX, marks.above_GA, votes, k)
        value_G[rows] = marks.lowest_G1[:, 0] + marks.spread_G1[:, 0] * (above_G / P_CX[n, k])
    return value_G


def loo_minus_one_profiles(profiles: Profiles, k: int) -> FloatArray:
    """`(1/C(n,k)) sum_{I: i in I} (f(I) - f(I without i))` for a sample of each answer, [G, A]; needs k >= 2."""
    n = int(profiles.counts_GA[0].sum())
    out_GA = np.zeros(profiles.rewards_GA.shape)
    P_CX = _binomials(n - 1, k - 1)
    for rows, A in chunks(profiles.counts_GA, k):
        counts_GA = profiles.counts_GA[rows, :A]
        marks = reward_marks(counts_GA, profiles.rewards_GA[rows, :A])
        chances = [P_CX[counts_GA[:, a]] for a in range(A)]
        own_GAX = P_CX[np.maximum(counts_GA - 1, 0)]
        change_GA = np.zeros(counts_GA.shape)
        for votes, high in pivotal_counts(counts_GA, k):
            pool_GX = P_CX[counts_GA[:, high:].sum(axis=-1)]
            joins_GA, wins_GA = vote_changes(chances[:high], pool_GX, marks, votes, k)
            change_GA[:, :high] += joins_GA * own_GAX[:, :high, votes - 1] + wins_GA * own_GAX[:, :high, votes]
        out_GA[rows, :A] = change_GA * (k / n) / P_CX[n - 1, k - 1]
    return out_GA


class Marks(NamedTuple):
    """Rewards above a group's lowest and below its highest, in units of their spread, [G, A]; lowest, spread, [G, 1].

    The unit keeps products of marks within float64 for rewards of any size.
    """

    above_GA: FloatArray
    below_GA: FloatArray
    lowest_G1: FloatArray
    spread_G1: FloatArray


def reward_marks(counts_GA: IntArray, r_GA: FloatArray) -> Marks:
    """The marks of each answer; zero for the padding."""
    held_GA = counts_GA > 0
    lowest_G1 = r_GA.min(axis=-1, where=held_GA, initial=np.inf, keepdims=True)
    highest_G1 = r_GA.max(axis=-1, where=held_GA, initial=-np.inf, keepdims=True)
    spread_G1 = highest_G1 - lowest_G1
    unit_G1 = np.where(spread_G1 > 0, spread_G1, 1.0)
    above_GA = np.where(held_GA, r_GA - lowest_G1, 0.0) / unit_G1
    below_GA = np.where(held_GA, highest_G1 - r_GA, 0.0) / unit_G1
    return Marks(above_GA, below_GA, lowest_G1, spread_G1)


def vote_changes(
    chances: list[FloatArray], pool_GX: FloatArray, marks: Marks, votes: int, k: int
) -> tuple[FloatArray, FloatArray]:
    """The pivots of the contenders with each rival's mark turned into `r_a - r_b`, two [G, contenders].

    `r_a - r_b = spread (above_a below_b - below_a above_b)`: two-valued rewards then meet no cancellation.
    """
    above_GA, below_GA = marks.above_GA[:, : len(chances)], marks.below_GA[:, : len(chances)]
    joins_CGA, wins_CGA = pivots(chances, pool_GX, np.stack([above_GA, below_GA]), votes, k)
    joins_GA = (above_GA * joins_CGA[1] - below_GA * joins_CGA[0]) * marks.spread_G1
    return joins_GA, (above_GA * wins_CGA[1] - below_GA * wins_CGA[0]) * marks.spread_G1


def contenders(counts_GA: IntArray, votes: int) -> int:
    """How many leading columns hold all answers that can get `votes` votes."""
    return int((counts_GA >= votes).sum(axis=-1).max())


def pivotal_counts(counts_GA: IntArray, k: int) -> Iterator[tuple[int, int]]:
    """Top counts at which one more sample can change a vote of k - 1, and how many contenders each has (at least 2)."""
    A = counts_GA.shape[-1]
    for votes in range(-(-(k - 1) // A), k // 2 + 1):
        high = contenders(counts_GA, votes)
        if high < 2:
            return
        yield votes, high


def chunks(counts_GA: IntArray, k: int, extra: int = 0) -> Iterator[tuple[IntArray, int]]:
    """Rows with similar numbers of answers, few enough to fit in cache, and the largest number of answers among them.

    Answers fill the first columns. `extra` is the number of additional [k] tables per row.
    """
    answers_G = (counts_GA > 0).sum(axis=-1)
    order_G = np.argsort(answers_G, kind="stable")
    start = 0
    while start < len(order_G):
        A = int(answers_G[order_G[start]])
        row_bytes = 8 * (k + 1) * (extra + 3 * (A + 2) * (min(k, A) // 2 + 1))
        alike = int((answers_G[order_G[start:]] <= A + A // 4).sum())
        stop = start + min(alike, max(1, _CHUNK_BYTES // row_bytes))
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
