"""The exact expectation of each estimator over all action sequences of a small softmax policy.

Gradients are with respect to the logits of three actions; a group consists of n draws. On-policy draws come from PI;
off-policy draws come from MU, and each sample's advantage is multiplied by its own ratio, as in the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.objectives import oracle
from volley.objectives import advantages

PI = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
MU = [Fraction(1, 4), Fraction(1, 4), Fraction(1, 2)]
REWARD = [Fraction(0), Fraction(1), Fraction(3)]
# two actions give the same answer, so that votes differ from actions
RANK = [2, 1, 2]  # the best action ties with the worst
VOTE = [(0, Fraction(1)), (1, Fraction(-1)), (1, Fraction(-1))]
N = 5
PAIRS = [(5, 2), (5, 3), (5, 5), (4, 4), (6, 4)]
PAIRS_LEAVING_ONE = [(5, 2), (5, 4), (6, 3)]


def best(y: Sequence[int]) -> Fraction:
    return max(REWARD[action] for action in y)


def vote(y: Sequence[int]) -> Fraction:
    return oracle.voted([VOTE[action] for action in y])


def pick(y: Sequence[int]) -> Fraction:
    return oracle.picked([(RANK[action], REWARD[action]) for action in y])


def f_of(kind: str) -> Callable[[Sequence[int]], Fraction]:
    return {"maj_at_k": vote, "best_of_k": pick}.get(kind, best)


def expected_gradient(objective: Mapping[str, Any], n: int, *, behaviour: list[Fraction] = PI) -> NDArray[np.float64]:
    """`E sum_i w_i A_i grad log pi(y_i)` with `advantages`, over all sequences of the behaviour policy."""
    y_SN = np.array(list(oracle.sequences(len(PI), n)))
    chance_S = np.array([float(oracle.chance(behaviour, y)) for y in y_SN.tolist()])
    score_AA = np.array([[float(s) for s in oracle.score(PI, action)] for action in range(len(PI))])
    log_w_A = np.log([float(p / m) for p, m in zip(PI, behaviour, strict=True)])
    voting = objective["kind"] == "maj_at_k"
    reward_A = np.array([float(VOTE[a][1] if voting else REWARD[a]) for a in range(len(PI))])
    answer_A = np.array([answer for answer, _ in VOTE])
    a_SN = advantages(
        reward_A[y_SN], objective, log_weights=log_w_A[y_SN], answers=answer_A[y_SN], ranks=np.array(RANK)[y_SN]
    )
    gradient: NDArray[np.float64] = np.einsum("s,sn,snb->b", chance_S, a_SN * np.exp(log_w_A[y_SN]), score_AA[y_SN])
    return gradient


def true_gradient(kind: str, k: int) -> NDArray[np.float64]:
    return np.array([float(x) for x in oracle.expectation_gradient(PI, f_of(kind), k)])


def against_others(
    f: Callable[[tuple[int, ...], tuple[int, ...]], Fraction], k: int, behaviour: Sequence[Fraction] = MU
) -> NDArray[np.float64]:
    return np.array([float(x) for x in oracle.one_against_others_gradient(PI, behaviour, f, k)])


def agree(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13)
    assert np.abs(expected).max() > 1e-3  # a gradient of zero would prove nothing


MAX_UP_TO_N = [{"kind": "max_at_k", "baseline": baseline} for baseline in ("none", "loo_minus_one")]
MAX_LEAVING_ONE = [{"kind": "max_at_k", "baseline": baseline} for baseline in ("loo", "subset_loo")]
UP_TO_N = [*MAX_UP_TO_N, {"kind": "maj_at_k"}, {"kind": "best_of_k"}]
CASES = [(objective, n, k) for objective in UP_TO_N for n, k in PAIRS]
CASES += [(objective, n, k) for objective in MAX_LEAVING_ONE for n, k in PAIRS_LEAVING_ONE]


@pytest.mark.parametrize(("objective", "n", "k"), CASES)
def test_on_policy_estimates_are_unbiased(objective: dict[str, Any], n: int, k: int) -> None:
    agree(expected_gradient({**objective, "k": k}, n), true_gradient(objective["kind"], k))


@pytest.mark.parametrize(("objective", "n", "k"), CASES)
def test_exact_off_policy_estimates_are_unbiased(objective: dict[str, Any], n: int, k: int) -> None:
    off_policy = {**objective, "k": k, "companion_weights": "exact"}
    agree(expected_gradient(off_policy, n, behaviour=MU), true_gradient(objective["kind"], k))


SUMS = [(objective, {1: 0.25, 3: 1.0, 5: 0.5}) for objective in UP_TO_N]
SUMS += [(objective, {1: 0.25, 2: 1.0, 4: 0.5}) for objective in MAX_LEAVING_ONE]


@pytest.mark.parametrize(("objective", "weights"), SUMS)
@pytest.mark.parametrize("companion_weights", ["none", "exact"])
def test_sums_over_k_are_unbiased(objective: dict[str, Any], weights: dict[int, float], companion_weights: str) -> None:
    whole = {**objective, "weights": weights, "companion_weights": companion_weights}
    behaviour = MU if companion_weights == "exact" else PI
    expected = sum(weight * true_gradient(objective["kind"], k) for k, weight in weights.items())
    agree(expected_gradient(whole, N, behaviour=behaviour), np.asarray(expected))


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k"])
@pytest.mark.parametrize("behaviour", [PI, MU], ids=["on-policy", "off-policy"])
def test_k_one_is_unbiased_for_the_mean(kind: str, behaviour: list[Fraction]) -> None:
    actual = expected_gradient({"kind": kind, "k": 1}, N, behaviour=behaviour)
    agree(actual, true_gradient(kind, 1))


@pytest.mark.parametrize("behaviour", [PI, MU], ids=["on-policy", "off-policy"])
def test_mean_is_unbiased(behaviour: list[Fraction]) -> None:
    agree(expected_gradient({"kind": "mean"}, N, behaviour=behaviour), true_gradient("mean", 1))


@pytest.mark.parametrize(("n", "k"), PAIRS)
@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k"])
def test_centring_mixes_in_the_objective_of_k_minus_one(kind: str, n: int, k: int) -> None:
    """Centred loo_minus_one estimates (1 - k/n) f@k + (k/n) f@(k-1); at k = n this is the paper's f@(n-1)."""
    mixed = (1 - k / n) * true_gradient(kind, k) + k / n * true_gradient(kind, k - 1)
    agree(expected_gradient({"kind": kind, "k": k, "center": True}, n), mixed)


@pytest.mark.parametrize(("n", "k"), PAIRS_LEAVING_ONE)
def test_centring_scales_the_other_baselines(n: int, k: int) -> None:
    scales = {"none": 1 - k / n, "loo": 1 + k / (n * (n - 1)), "subset_loo": 1.0}
    for baseline, scale in scales.items():
        objective = {"kind": "max_at_k", "k": k, "baseline": baseline, "center": True}
        agree(expected_gradient(objective, n), scale * true_gradient("max_at_k", k))


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k"])
def test_without_companion_weights_companions_follow_the_behaviour_policy(kind: str) -> None:
    n, k, f = 5, 3, f_of(kind)
    biased = against_others(lambda own, rest: f((*own, *rest)) - f(rest), k)
    agree(expected_gradient({"kind": kind, "k": k}, n, behaviour=MU), biased)
    assert np.abs(biased - true_gradient(kind, k)).max() > 1e-2


def test_first_order_expands_the_companions_weight() -> None:
    """The behaviour policy is close enough that no pair of companions expands to a negative weight."""
    n, k = 5, 3
    near = [Fraction(5, 12), Fraction(1, 3), Fraction(1, 4)]
    w = [p / m for p, m in zip(PI, near, strict=True)]

    def expanded(own: tuple[int, ...], rest: tuple[int, ...]) -> Fraction:
        return (1 + sum((w[j] - 1 for j in rest), oracle.ZERO)) * (best((*own, *rest)) - best(rest))

    objective = {"kind": "max_at_k", "k": k, "companion_weights": "first_order"}
    agree(expected_gradient(objective, n, behaviour=near), against_others(expanded, k, near))


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k"])
def test_a_weight_cap_truncates_the_companions_weight(kind: str) -> None:
    n, k, f, cap = 5, 3, f_of(kind), Fraction(5, 4)
    capped = [min(p / m, cap) for p, m in zip(PI, MU, strict=True)]

    def truncated(own: tuple[int, ...], rest: tuple[int, ...]) -> Fraction:
        weight = oracle.product_weight([capped[j] for j in rest])(range(len(rest)))
        return weight * (f((*own, *rest)) - f(rest))

    objective = {"kind": kind, "k": k, "companion_weights": "exact", "weight_cap": float(cap)}
    agree(expected_gradient(objective, n, behaviour=MU), against_others(truncated, k))


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k"])
def test_self_normalisation_is_biased_and_consistent(kind: str) -> None:
    objective = {"kind": kind, "k": 2, "companion_weights": "self_normalised"}
    truth = true_gradient(kind, 2)
    bias = [np.abs(expected_gradient(objective, n, behaviour=MU) - truth).max() for n in (3, 5, 8)]
    assert bias[0] > bias[1] > bias[2] > 1e-4
    assert bias[2] * 8 < 1.2 * bias[1] * 5  # falls about as 1/n


@pytest.mark.parametrize("beta", [0.0, 0.7, 5.0])
def test_softmax_is_unbiased_for_its_own_value_on_n_samples(beta: float) -> None:
    agree(expected_gradient({"kind": "softmax", "beta": beta}, 4), softmax_gradient(beta, 4))


def test_centred_softmax_estimates_its_value_on_one_sample_less() -> None:
    agree(expected_gradient({"kind": "softmax", "beta": 2.0, "center": True}, 4), softmax_gradient(2.0, 3))


def softmax_gradient(beta: float, n: int) -> NDArray[np.float64]:
    def value(y: Sequence[int]) -> Fraction:
        g = np.array([float(REWARD[action]) for action in y])
        p = np.exp(beta * g)
        return Fraction(float((p / p.sum()) @ g))

    return np.array([float(x) for x in oracle.expectation_gradient(PI, value, n)])


def test_maxrl_estimates_a_harmonic_sum_of_pass_at_k() -> None:
    """It estimates n times the gradient of `sum_{k<n} pass@k / k`, the truncated logarithm of the solve rate."""
    n = 5
    solved = [Fraction(0), Fraction(1), Fraction(0)]
    y_SN = np.array(list(oracle.sequences(3, n)))
    chance_S = np.array([float(oracle.chance(PI, y)) for y in y_SN.tolist()])
    score_AA = np.array([[float(s) for s in oracle.score(PI, action)] for action in range(3)])
    a_SN = advantages(np.array([0.0, 1.0, 0.0])[y_SN], {"kind": "maxrl"})
    actual = np.einsum("s,sn,snb->b", chance_S, a_SN, score_AA[y_SN])
    terms = [oracle.expectation_gradient(PI, lambda y: max(solved[a] for a in y), k) for k in range(1, n)]
    expected = n * np.array([[float(x) / k for x in term] for k, term in enumerate(terms, start=1)]).sum(axis=0)
    agree(actual, expected)


def test_the_oracle_gradient_is_the_derivative_of_max_at_k() -> None:
    """The oracle itself, compared with central differences of max@3 from order statistics."""

    def max_at_3(logits: NDArray[np.float64]) -> float:
        p = np.exp(logits) / np.exp(logits).sum()
        below = np.cumsum(p)  # REWARD rises with the action
        return float(np.diff(below**3, prepend=0.0) @ [float(reward) for reward in REWARD])

    logits, step = np.log([float(p) for p in PI]), 1e-5
    differences = [(max_at_3(logits + e) - max_at_3(logits - e)) / (2 * step) for e in step * np.eye(3)]
    np.testing.assert_allclose(true_gradient("max_at_k", 3), differences, rtol=1e-8)
