"""The objectives implemented a second time, by enumeration in rational arithmetic: slow, short, and obviously right.

Rewards `g` and weights `w` are lists of Fractions; a *vote* is a list of (answer, reward) pairs. `f` is any function
of a list of samples. Nothing here imports the code under test.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, product
from math import comb, prod
from typing import TypeVar

Sample = TypeVar("Sample")
Group = Sequence[Sample]
Value = Callable[[Sequence[Sample]], Fraction]
Weight = Callable[[Sequence[int]], Fraction]
ZERO, ONE = Fraction(0), Fraction(1)


def best(samples: Sequence[Fraction]) -> Fraction:
    """The maximum, which is the f of max@k."""
    return max(samples)


def voted(samples: Sequence[tuple[int, Fraction]]) -> Fraction:
    """The mean reward of the answers with the most votes, which is the f of maj@k."""
    votes = Counter(answer for answer, _ in samples)
    reward = dict(samples)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum((reward[answer] for answer in winners), ZERO) / len(winners)


def picked(samples: Sequence[tuple[int, Fraction]]) -> Fraction:
    """The mean reward of the samples of highest rank, which is the f of best-of-k; a sample is (rank, reward)."""
    top = max(rank for rank, _ in samples)
    rewards = [reward for rank, reward in samples if rank == top]
    return sum(rewards, ZERO) / len(rewards)


def without(group: Group[Sample], i: int) -> list[Sample]:
    """`y_-i`: the group without sample i."""
    return [*group[:i], *group[i + 1 :]]


def metric(f: Value[Sample], y: Group[Sample], k: int, w: Sequence[Fraction] | None = None) -> Fraction:
    """The mean over k-subsets of f times the product of the subset's weights."""
    total = ZERO
    for subset in combinations(range(len(y)), k):
        weight = prod((w[j] for j in subset), start=ONE) if w else ONE
        total += weight * f([y[j] for j in subset])
    return total / comb(len(y), k)


def product_weight(w: Sequence[Fraction]) -> Weight:
    """The exact weight of companions: the product of their weights."""
    return lambda companions: prod((w[j] for j in companions), start=ONE)


def first_order_weight(w: Sequence[Fraction]) -> Weight:
    """The weight of companions expanded to first order around 1."""
    return lambda companions: 1 + sum((w[j] - 1 for j in companions), ZERO)


def unweighted(companions: Sequence[int]) -> Fraction:
    """The weight of companions on-policy: 1."""
    return ONE


def _over_sets(n: int, k: int, weight: Weight, gain: Callable[[int, tuple[int, ...]], Fraction]) -> list[Fraction]:
    """For every i, the sum over k-subsets with i of the companions' weight times the gain, divided by C(n, k)."""

    def total(i: int) -> Fraction:
        companies = combinations([j for j in range(n) if j != i], k - 1)
        return sum((weight(companions) * gain(i, companions) for companions in companies), ZERO)

    return [total(i) / comb(n, k) for i in range(n)]


def no_baseline(f: Value[Sample], y: Group[Sample], k: int, weight: Weight = unweighted) -> list[Fraction]:
    """`s_i`, with the weights of the companions but not of i itself."""
    return _over_sets(len(y), k, weight, lambda i, companions: f([y[i], *(y[j] for j in companions)]))


def loo_minus_one(f: Value[Sample], y: Group[Sample], k: int, weight: Weight = unweighted) -> list[Fraction]:
    """The sum over k-subsets I with i of `f(I) - f(I without i)` times the companions' weight, divided by C(n, k)."""

    def gain(i: int, companions: tuple[int, ...]) -> Fraction:
        rest = [y[j] for j in companions]
        return f([y[i], *rest]) - f(rest)

    return _over_sets(len(y), k, weight, gain)


def loo(f: Value[Sample], y: Group[Sample], k: int, w: Sequence[Fraction] | None = None) -> list[Fraction]:
    """`s_i - k/(n-1) f@k(y_-i)`."""
    return _less_metric_of_others(f, y, k, w, Fraction(k, len(y) - 1))


def subset_loo(f: Value[Sample], y: Group[Sample], k: int, w: Sequence[Fraction] | None = None) -> list[Fraction]:
    """`s_i - k/n f@k(y_-i)`; on-policy this is `f@k(y) - f@k(y_-i)`."""
    return _less_metric_of_others(f, y, k, w, Fraction(k, len(y)))


def _less_metric_of_others(
    f: Value[Sample], y: Group[Sample], k: int, w: Sequence[Fraction] | None, scale: Fraction
) -> list[Fraction]:
    weight = product_weight(w) if w else unweighted
    s = no_baseline(f, y, k, weight)
    return [s[i] - scale * metric(f, without(y, i), k, without(w, i) if w else None) for i in range(len(y))]


def reinforce_loo(g: Sequence[Fraction]) -> list[Fraction]:
    """`(g_i - mean(g_-i)) / n`."""
    n = len(g)
    return [(g[i] - sum(without(g, i), ZERO) / (n - 1)) / n for i in range(n)]


def centred(a: Sequence[Fraction]) -> list[Fraction]:
    """The advantages minus their mean."""
    return [x - sum(a, ZERO) / len(a) for x in a]


# Exact expectations under a softmax policy over a few actions.


def sequences(actions: int, length: int) -> Iterator[tuple[int, ...]]:
    """All action sequences, in lexicographic order."""
    return product(range(actions), repeat=length)


def chance(policy: Sequence[Fraction], y: Sequence[int]) -> Fraction:
    """The probability of a sequence."""
    return prod((policy[a] for a in y), start=ONE)


def score(policy: Sequence[Fraction], action: int) -> list[Fraction]:
    """`grad log pi(action)` for a softmax policy, with respect to its logits."""
    return [(ONE if b == action else ZERO) - policy[b] for b in range(len(policy))]


def expectation_gradient(
    policy: Sequence[Fraction], f: Callable[[tuple[int, ...]], Fraction], k: int
) -> list[Fraction]:
    """`grad E f(y_1..y_k)` under the policy, by enumeration."""
    gradient = [ZERO] * len(policy)
    for y in sequences(len(policy), k):
        weight = chance(policy, y) * f(y)
        for action in y:
            for b, s in enumerate(score(policy, action)):
                gradient[b] += weight * s
    return gradient


def one_against_others_gradient(
    policy: Sequence[Fraction],
    behaviour: Sequence[Fraction],
    f: Callable[[tuple[int, ...], tuple[int, ...]], Fraction],
    k: int,
) -> list[Fraction]:
    """`k E[f((y_1,), (y_2..y_k)) grad log pi(y_1)]`: y_1 is the policy's, its companions the behaviour policy's."""
    gradient = [ZERO] * len(policy)
    for action in range(len(policy)):
        value = sum((chance(behaviour, rest) * f((action,), rest) for rest in sequences(len(policy), k - 1)), ZERO)
        for b, s in enumerate(score(policy, action)):
            gradient[b] += k * policy[action] * value * s
    return gradient
