"""Focal weights: their formula in slow loops, and their effect on the expected gradient over all groups of a policy."""

from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.objectives import oracle
from volley.objectives import MaxAtK, MaxRL, Mean, Softmax, advantage_report, advantages, parse_objective, with_changes

N = 5
PI = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
KINDS: list[dict[str, Any]] = [
    {"kind": "mean"},
    {"kind": "mean", "center": True, "normalize": "std"},
    {"kind": "max_at_k", "k": 2, "baseline": "none"},
    {"kind": "max_at_k", "weights": {1: 0.5, 3: 1.0}},
    {"kind": "maj_at_k", "k": 3},
    {"kind": "best_of_k", "k": 2},
    {"kind": "softmax", "beta": 2.0},
    {"kind": "maxrl"},
]


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("objective", KINDS, ids=str)
def test_each_group_is_weighted_by_its_own_solve_rate(objective: dict[str, Any], gamma: float) -> None:
    """With masks: what a masked sample was paid does not count."""
    rng = np.random.default_rng(4)
    answers = rng.integers(0, 2, (40, 6))
    rewards = np.where(answers == 1, 1.0, np.where(rng.random(40) < 0.3, 0.5, 0.0)[:, None])
    valid = rng.random((40, 6)) < 0.8
    given = {"answers": answers, "ranks": rng.normal(size=(40, 6)), "valid": valid}
    report = advantage_report(np.where(valid, rewards, np.nan), {**objective, "focal": gamma}, **given)
    plain = advantages(rewards, objective, **given)
    for row, kept in enumerate(valid):
        solved = sum(reward for reward, keeps in zip(rewards[row], kept, strict=True) if keeps)
        weight = (1 - solved / max(int(kept.sum()), 1)) ** gamma
        assert report.focal_weights[row] == pytest.approx(weight, abs=1e-12)
        np.testing.assert_allclose(report.advantages[row], weight * plain[row], rtol=1e-12, atol=1e-12)
    assert len(np.unique(report.focal_weights.round(9))) > 5
    assert (advantage_report(rewards, objective, **given).focal_weights == 1).all()


def gradient(objective: dict[str, Any], reward: list[Fraction]) -> NDArray[np.float64]:
    """The expected gradient for the logits of three actions, over all groups of N."""
    y_SN = np.array(list(oracle.sequences(len(PI), N)))
    chance_S = np.array([float(oracle.chance(PI, y)) for y in y_SN.tolist()])
    score_AA = np.array([[float(s) for s in oracle.score(PI, action)] for action in range(len(PI))])
    a_SN = advantages(np.array([float(r) for r in reward])[y_SN], objective)
    expected: NDArray[np.float64] = np.einsum("s,sn,snb->b", chance_S, a_SN, score_AA[y_SN])
    return expected


def true_gradient(reward: list[Fraction]) -> NDArray[np.float64]:
    return np.array([float(x) for x in oracle.expectation_gradient(PI, lambda y: reward[y[0]], 1)])


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_on_binary_rewards_only_the_weight_of_the_prompt_changes(gamma: float) -> None:
    """The factor, with x successes among the other n - 1 samples: with one more if the sample itself succeeds."""
    reward = [Fraction(0), Fraction(0), Fraction(1)]
    p = float(PI[2])
    factor = 0.0
    for x in range(N):
        chance = comb(N - 1, x) * p**x * (1 - p) ** (N - 1 - x)
        succeeds = (1 - (x + 1) / N) ** gamma * (1 - x / (N - 1))
        fails = (1 - x / N) ** gamma * (x / (N - 1))
        factor += chance * (succeeds + fails)
    actual = gradient({"kind": "mean", "focal": gamma}, reward)
    np.testing.assert_allclose(actual, factor * true_gradient(reward), rtol=1e-11, atol=1e-13)
    assert factor != pytest.approx((1 - p) ** gamma, rel=0.01), "the weight uses the sample itself: biased"


@pytest.mark.parametrize("k", [2, 3])
def test_max_at_k_has_the_focal_weight_without_bias(k: int) -> None:
    reward = [Fraction(0), Fraction(1), Fraction(1)]
    failure = float(PI[0])
    exact = k * failure ** (k - 1) * true_gradient(reward)
    np.testing.assert_allclose(gradient({"kind": "max_at_k", "k": k}, reward), exact, rtol=1e-11, atol=1e-13)


def test_on_other_rewards_the_direction_changes_too() -> None:
    reward = [Fraction(0), Fraction(1, 2), Fraction(1)]
    biased, exact = gradient({"kind": "mean", "focal": 1.0}, reward), true_gradient(reward)
    cosine = biased @ exact / np.linalg.norm(biased) / np.linalg.norm(exact)
    assert 0.5 < cosine < 0.999


@pytest.mark.parametrize("rewards", [[-1.0, 1.0], [0.0, 2.0], [-0.1, 1.0], [0.0, 1.1], [0.0, 1.00001]])
def test_rewards_that_are_no_solve_rate_are_rejected(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="focal needs rewards from 0 to 1"):
        advantages(rewards, Mean(focal=1.0))
    assert not advantages([1.0, 1.0 + 1e-7], Mean(focal=1.0)).any()  # what float32 sums of shares may give


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k", "best_of_k"])
def test_companion_weights_and_focal_weights_exclude_each_other(kind: str) -> None:
    with pytest.raises(ValueError, match="write focal: 0, or companion_weights: none"):
        parse_objective({"kind": kind, "k": 2, "companion_weights": "exact", "focal": 1.0})
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        parse_objective({"kind": kind, "k": 2, "focal": -1.0})


def test_a_change_of_kind_keeps_the_weight() -> None:
    assert with_changes(MaxAtK(k=8, focal=0.5), {"kind": "maxrl"}) == MaxRL(focal=0.5)
    assert with_changes(Softmax(beta=1.0, focal=0.5), {"focal": 0.0}) == Softmax(beta=1.0)
