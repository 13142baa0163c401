"""Products of vote polynomials: how often an answer is at the top of a vote, and with how many others it is tied.

Let each answer a get x votes with chance `P_a(x)`, independently. The chance that answer b has t votes, no answer
has more, and all answers together have k is a coefficient of a product with one factor per answer,

    [z^k]  P_b(t) z^t  prod_{a != b} ( sum_{x<t} P_a(x) z^x + u P_a(t) z^t )

where the power of `u` counts the answers tied with b. A tie of s + 1 answers shares the reward by s + 1, and
1 / (s + 1) = int_0^1 u^s du: the integral is taken by Gauss-Legendre quadrature, exact for polynomials. Every term
is non-negative, so nothing cancels.

Answers that cannot reach t votes do not need separate factors: together they form a *pool*, one polynomial in z.

Stacks of polynomials are [1 + marks, G, nodes, degree + 1]. Channel 0 is the plain product. Channel c > 0 sums over
the choice of b, weighted by b's mark c, and leaves out its factor z^t.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from volley.objectives.combinatorics import FloatArray


def top_share(
    chances: Sequence[FloatArray], pool_GX: FloatArray, marks_GA: FloatArray, votes: int, k: int
) -> FloatArray:
    """Chance that the top count among k votes is `votes`, times the mean mark of the answers tied there, [G].

    chances: `P_a(x)` as [G, X] with X > votes, one for each of the A answers that can get `votes` votes.
    pool_GX: chances of the votes of all other answers, X > k.
    """
    A = len(chances)
    u_Q, weight_Q = _unit_quadrature(min(k // votes, A) - 1)
    stack = _start(1, pool_GX, len(u_Q), k - votes)
    for a in range(A):
        stack = _times(stack, chances[a], marks_GA[None, :, a], votes, u_Q)
    share_G: FloatArray = stack[1, :, :, -1] @ weight_Q
    return share_G


def pivots(
    chances: Sequence[FloatArray], pool_GX: FloatArray, marks_CGA: FloatArray, votes: int, k: int
) -> tuple[FloatArray, FloatArray]:
    """The other answers' part in how one more sample of answer a changes a vote of k - 1; two [C, G, A].

    `joins`: with a at votes - 1 below a tie of s answers at `votes`, the sum of marks over the tie / (s (s + 1)).
    `wins`: with a among a tie of s answers at `votes`, the sum of marks over the other tied / s.
    Neither includes the chance of a's own count. Products without a join those before a and those after.
    """
    C, G, A = marks_CGA.shape
    degree = k - 2 * votes  # votes left for the rest in `joins`; one less in `wins`
    u_Q, weight_Q = _unit_quadrature(min(degree // votes, max(A - 2, 0)) + 1)
    nothing_GX = np.zeros((G, degree + 1))
    nothing_GX[:, 0] = 1.0
    after = [_start(C, nothing_GX, len(u_Q), degree)]
    for a in range(A - 1, 0, -1):
        after.append(_times(after[-1], chances[a], marks_CGA[..., a], votes, u_Q))
    before = _start(C, pool_GX, len(u_Q), degree)
    joins_CGA, wins_CGA = np.zeros((2, C, G, A))
    for a in range(A):
        rest = after.pop()
        joins_CGA[..., a] = _coefficient(before, rest, degree) @ (weight_Q * (1 - u_Q))
        wins_CGA[..., a] = _coefficient(before, rest, degree - 1) @ (weight_Q * u_Q)
        before = _times(before, chances[a], marks_CGA[..., a], votes, u_Q)
    return joins_CGA, wins_CGA


def _start(marks: int, pool_GX: FloatArray, nodes: int, degree: int) -> FloatArray:
    """The product of the pool alone, before any answer at the top."""
    stack = np.zeros((1 + marks, len(pool_GX), nodes, degree + 1))
    stack[0] = pool_GX[:, None, : degree + 1]
    return stack


def _times(stack: FloatArray, chance_GX: FloatArray, marks_CG: FloatArray, votes: int, u_Q: FloatArray) -> FloatArray:
    """Multiply by the factor of one answer, truncated at the degree of `stack`; marked channels by the product rule."""
    size = stack.shape[-1]
    chance_XG11 = chance_GX.T[..., None, None]
    out: FloatArray = stack * chance_XG11[0]
    for x in range(1, min(votes, size)):
        out[..., x:] += stack[..., :-x] * chance_XG11[x]
    if votes < size:
        out[..., votes:] += stack[..., :-votes] * (chance_XG11[votes] * u_Q[:, None])
    out[1:] += stack[0] * (marks_CG[..., None, None] * chance_XG11[votes])
    return out


def _coefficient(before: FloatArray, after: FloatArray, degree: int) -> FloatArray:
    """The marked channels of the product of two stacks at one degree, [C, G, nodes]."""
    if degree < 0:
        return np.zeros((len(before) - 1, *before.shape[1:3]))
    left, right = before[..., : degree + 1], after[..., degree::-1]
    out_CGQ: FloatArray = np.einsum("gqd,cgqd->cgq", left[0], right[1:])
    out_CGQ += np.einsum("cgqd,gqd->cgq", left[1:], right[0])
    return out_CGQ


@lru_cache(maxsize=64)
def _unit_quadrature(degree: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights on [0, 1] that integrate polynomials up to this degree exactly."""
    nodes, weights = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return (nodes + 1) / 2, weights / 2
