"""Softmax, analytic pass@k, MaxRL, risk-sensitive and normalised advantages equal their published formulas."""

from fractions import Fraction
from math import comb, exp, sqrt

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.unit.objectives.strategies import given
from volley.objectives import MaxAtK, MaxRL, Mean, PassAtKAnalytic, RiskSensitive, Softmax, advantages
from volley.objectives.spec import Baseline

reward_lists = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=2, max_size=9)


def softmax_value(g: list[float], beta: float) -> float:
    p = [exp(beta * (x - max(g))) for x in g]
    return sum(x * y for x, y in zip(p, g, strict=True)) / sum(p)


@given(g=reward_lists, beta=st.sampled_from([0.0, 0.1, 1.0, 3.0]))
def test_softmax_is_leave_one_out(g: list[float], beta: float) -> None:
    expected = [softmax_value(g, beta) - softmax_value(g[:i] + g[i + 1 :], beta) for i in range(len(g))]
    np.testing.assert_allclose(advantages(g, Softmax(beta=beta)), expected, atol=1e-12)


def test_softmax_survives_a_sample_that_holds_all_the_weight() -> None:
    """The others are 1e4 nats below; without that sample they share its weight, and nothing overflows."""
    a = advantages([0.0, 1.0, 10.0], Softmax(beta=1000.0))
    np.testing.assert_allclose(a, [0.0, 0.0, 9.0], atol=1e-12)


@given(n=st.integers(2, 30), data=st.data())
def test_analytic_pass_at_k(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n - 1))
    wrong = n - c
    all_wrong = Fraction(comb(wrong, k), comb(n, k))
    sd = sqrt(all_wrong * (1 - all_wrong))
    expected = [0.0] * n
    if sd > 0:
        failing = all_wrong - Fraction(comb(wrong - 1, k - 1), comb(n - 1, k - 1)) if wrong else 0
        expected = [float(all_wrong) / sd] * c + [float(failing) / sd] * wrong
    actual = advantages([1.0] * c + [0.0] * wrong, PassAtKAnalytic(k=k))
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13)


def test_analytic_pass_at_k_rejects_other_rewards() -> None:
    with pytest.raises(ValueError, match="needs rewards 0 or 1"):
        advantages([1.0, -1.0, 1.0], PassAtKAnalytic(k=2))


@given(g=st.lists(st.integers(0, 20).map(lambda x: x / 4), min_size=2, max_size=9))
def test_maxrl(g: list[float]) -> None:
    mean = sum(g) / len(g)
    expected = [(x - mean) / mean if mean else 0.0 for x in g]
    np.testing.assert_allclose(advantages(g, MaxRL()), expected, atol=1e-13)


def test_maxrl_rejects_negative_rewards() -> None:
    with pytest.raises(ValueError, match="map -1/\\+1 to 0/1"):
        advantages([1.0, -1.0], MaxRL())


@given(g=reward_lists, beta=st.sampled_from([-2.0, -0.3, 0.5, 4.0]))
def test_risk_sensitive(g: list[float], beta: float) -> None:
    mean = sum(exp(beta * x) for x in g) / len(g)
    expected = [(exp(beta * x) / mean - 1) / beta for x in g]
    np.testing.assert_allclose(advantages(g, RiskSensitive(beta=beta)), expected, rtol=1e-11, atol=1e-12)


def test_risk_sensitive_is_precise_at_both_ends() -> None:
    g = np.array([0.3, -1.2, 2.0, 0.0])
    np.testing.assert_allclose(advantages(g, RiskSensitive(beta=1e-12)), g - g.mean(), rtol=1e-9)
    np.testing.assert_allclose(advantages(1e4 * g, RiskSensitive(beta=1.0)), [-1, -1, 3, -1], rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e-3, 1e3, 1e200, 1e307])
def test_normalized_advantages_do_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    g = np.array([[0.0, 1.0, 1.0, 0.25], [-1.0, 1.0, 0.5, 0.5]])
    for objective in (Mean(normalize="std"), MaxAtK(k=2, normalize="std", center=True)):
        np.testing.assert_allclose(advantages(scale * g, objective), advantages(g, objective), rtol=1e-9)


def test_normalize_divides_by_the_deviation_of_the_rewards() -> None:
    g = np.random.default_rng(0).normal(size=(5, 8))
    grpo = (g - g.mean(axis=-1, keepdims=True)) / g.std(axis=-1, keepdims=True)
    np.testing.assert_allclose(7 * advantages(g, Mean(normalize="std")), grpo, rtol=1e-12)
    plain = advantages(g, MaxAtK(k=4))
    np.testing.assert_allclose(
        advantages(g, MaxAtK(k=4, normalize="std")), plain / g.std(axis=-1, keepdims=True), rtol=1e-12
    )


@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "mean"},
        {"kind": "max_at_k", "k": 4},
        {"kind": "max_at_k", "k": 3, "baseline": "subset_loo"},
        {"kind": "max_at_k", "k": 3, "baseline": "none", "center": True},
        {"kind": "softmax", "beta": 2.0},
        {"kind": "pass_at_k_analytic", "k": 2},
        {"kind": "maxrl"},
        {"kind": "risk_sensitive", "beta": 1.5},
    ],
)
@pytest.mark.parametrize("normalize", ["none", "std"])
def test_equal_rewards_carry_exactly_no_signal(objective: dict[str, object], normalize: str) -> None:
    """0.1 is not an exact float: rounding errors must not count as signal, least of all divided by a zero deviation."""
    value = 1.0 if objective["kind"] == "pass_at_k_analytic" else 0.1
    assert not advantages(np.full((2, 7), value), {**objective, "normalize": normalize}).any()


@pytest.mark.parametrize("baseline", ["none", "loo"])
def test_normalized_groups_of_equal_rewards_are_zero_even_without_a_centred_baseline(baseline: Baseline) -> None:
    equal = np.full((2, 7), 0.1)
    assert advantages(equal, MaxAtK(k=3, baseline=baseline)).any()
    assert not advantages(equal, MaxAtK(k=3, baseline=baseline, normalize="std")).any()


def test_rounding_noise_does_not_become_a_full_advantage() -> None:
    """Rewards that differ by one float32 ulp count as equal in GRPO's division; a difference of 0.001 does not."""
    one = np.float32(0.7)
    jitter = np.array([one, one, np.nextafter(one, np.float32(1)), one], dtype=np.float64)
    assert np.ptp(jitter) > 0
    for objective in (Mean(normalize="std"), MaxAtK(k=2, normalize="std"), MaxAtK(k=2, normalize="std", center=True)):
        for scale in (1.0, -1.0, 1e6, 1e-12):
            assert not advantages(scale * jitter, objective).any()
            assert advantages(scale * np.array([0.7, 0.7, 0.7007, 0.7]), objective).any()
    almost = advantages([0.7, 0.7, 0.7007, 0.7], Mean(normalize="std"))
    np.testing.assert_allclose(almost, advantages([0.0, 0.0, 1.0, 0.0], Mean(normalize="std")), rtol=1e-9)


def test_centred_groups_of_equal_rewards_carry_no_signal_with_any_weights() -> None:
    objective = MaxAtK(k=3, baseline="none", center=True)
    equal = np.full((3, 7), 0.1)
    assert not advantages(equal, objective, log_weights=np.zeros((3, 7))).any()


def test_normalize_applies_after_centring() -> None:
    g = np.random.default_rng(1).normal(size=(5, 8))
    centred = advantages(g, MaxAtK(k=4, center=True))
    both = advantages(g, MaxAtK(k=4, center=True, normalize="std"))
    np.testing.assert_allclose(both, centred / g.std(axis=-1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(both.sum(axis=-1), 0, atol=1e-12)
