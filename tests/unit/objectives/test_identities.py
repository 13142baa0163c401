"""Estimators that must coincide, on groups too large to enumerate."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.objectives.strategies import given
from volley.objectives import MajAtK, MaxAtK, Mean, Softmax, advantages, leave_p_out, maj_at_k, max_at_k
from volley.objectives.spec import Baseline, CompanionWeights

Floats = NDArray[np.float64]
BASELINES: list[Baseline] = ["none", "loo", "subset_loo", "loo_minus_one"]


def groups(seed: int, rows: int = 20, n: int = 16) -> Floats:
    """Continuous, binary and few-valued rewards, including negative ones."""
    rng = np.random.default_rng(seed)
    return np.concatenate([
        rng.normal(size=(rows, n)),
        (rng.random((rows, n)) < rng.random((rows, 1))).astype(float),
        rng.integers(-2, 3, (rows, n)).astype(float),
    ])  # fmt: skip


def same(actual: Floats, expected: Floats) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13)


def max_of_others(g: Floats) -> Floats:
    others = [np.delete(g, i, axis=-1).max(axis=-1) for i in range(g.shape[-1])]
    return np.stack(others, axis=-1)


@given(seed=st.integers(0, 1000))
def test_k_equal_n_is_the_best_minus_the_best_of_the_others(seed: int) -> None:
    g = groups(seed)
    same(advantages(g, MaxAtK(k=16)), g.max(axis=-1, keepdims=True) - max_of_others(g))


@given(seed=st.integers(0, 1000))
def test_leave_one_out_of_max_at_n_minus_one_is_the_papers_biased_estimate(seed: int) -> None:
    g = groups(seed)
    a = g.max(axis=-1, keepdims=True) - max_of_others(g)
    biased = a - a.mean(axis=-1, keepdims=True)
    same(advantages(g, MaxAtK(k=16, center=True)), biased)
    same(advantages(g, MaxAtK(k=15, baseline="subset_loo")), biased)
    same(advantages(g, leave_p_out(1, 16)), biased)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_leave_p_out_is_the_papers_sum_over_left_out_sets(p: int) -> None:
    """arXiv 2503.19595, appendix B.2: `max g - max g_-s` minus its mean, summed over the sets s of p that contain i."""
    g, n = groups(5, rows=4, n=7), 7
    sets = list(combinations(range(n), p))
    kept_best = np.stack([np.delete(g, s, axis=-1).max(axis=-1) for s in sets], axis=-1)
    a_of_set = kept_best.mean(axis=-1, keepdims=True) - kept_best
    holds = np.array([[i in s for s in sets] for i in range(n)])
    same(advantages(g, leave_p_out(p, n)), a_of_set @ holds.T / comb(n - 1, p - 1))


@pytest.mark.parametrize("baseline", BASELINES)
def test_k_one_is_reinforce_leave_one_out(baseline: Baseline) -> None:
    g = groups(0)
    expected = (g - (g.sum(axis=-1, keepdims=True) - g) / 15) / 16
    same(advantages(g, MaxAtK(k=1, baseline=baseline)), expected)
    same(advantages(g, Mean()), expected)


@pytest.mark.parametrize("companion_weights", ["exact", "first_order", "self_normalised"])
@given(seed=st.integers(0, 1000), k=st.integers(2, 16))
def test_unit_weights_are_on_policy(companion_weights: CompanionWeights, seed: int, k: int) -> None:
    g = groups(seed)
    off_policy = MaxAtK(k=k, companion_weights=companion_weights)
    same(advantages(g, off_policy, log_weights=np.zeros_like(g)), advantages(g, MaxAtK(k=k)))
    same(advantages(g, off_policy), advantages(g, MaxAtK(k=k)))  # no weights given: on-policy
    same(max_at_k(g, k, log_weights=np.zeros_like(g)), max_at_k(g, k))


@pytest.mark.parametrize("baseline", BASELINES)
def test_unit_weights_are_on_policy_for_every_baseline(baseline: Baseline) -> None:
    g = groups(1)
    off_policy = MaxAtK(k=5, baseline=baseline, companion_weights="exact")
    same(advantages(g, off_policy, log_weights=np.zeros_like(g)), advantages(g, MaxAtK(k=5, baseline=baseline)))


@given(seed=st.integers(0, 1000), k=st.integers(2, 9))
def test_unit_weights_are_on_policy_for_votes(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    answers = rng.integers(0, 4, (10, 9))
    g = rng.normal(size=4)[answers]
    expected = advantages(g, MajAtK(k=k), answers=answers)
    off_policy = MajAtK(k=k, companion_weights="exact")
    same(advantages(g, off_policy, answers=answers, log_weights=np.zeros_like(g)), expected)


@pytest.mark.parametrize("companion_weights", ["exact", "self_normalised"])
def test_exact_weights_scale_and_self_normalised_ones_do_not(companion_weights: CompanionWeights) -> None:
    """Multiplying all weights by c multiplies a_i = w_i A_i by c^k; with self-normalisation it changes nothing."""
    g, k, log_c = groups(2), 5, 0.7
    log_w = np.random.default_rng(2).normal(size=g.shape)
    objective = MaxAtK(k=k, companion_weights=companion_weights)
    a = np.exp(log_w) * advantages(g, objective, log_weights=log_w)
    scaled = np.exp(log_w + log_c) * advantages(g, objective, log_weights=log_w + log_c)
    same(scaled, a * np.exp(log_c * k) if companion_weights == "exact" else a)


@given(c=st.integers(0, 12), k=st.integers(2, 12))
def test_binary_no_baseline_equals_the_closed_form(c: int, k: int) -> None:
    """arXiv 2505.15201, theorem 2."""
    n = 12
    wrong = k / n * (1 - comb(n - 1 - c, k - 1) / comb(n - 1, k - 1)) if c < n else 0.0
    same(
        advantages([1.0] * c + [0.0] * (n - c), MaxAtK(k=k, baseline="none")), np.array([k / n] * c + [wrong] * (n - c))
    )


@given(c=st.integers(0, 12), k=st.integers(2, 12))
def test_binary_default_is_the_chance_of_being_the_only_solution(c: int, k: int) -> None:
    """A correct sample counts in the subsets that only it solves; a wrong sample never counts."""
    n = 12
    correct = comb(n - c, k - 1) / comb(n, k) if c else 0.0
    same(advantages([1.0] * c + [0.0] * (n - c), MaxAtK(k=k)), np.array([correct] * c + [0.0] * (n - c)))


@pytest.mark.parametrize("k", [2, 7, 15])
def test_centred_no_baseline_is_a_scaled_subset_loo(k: int) -> None:
    g = groups(3)
    centred = advantages(g, MaxAtK(k=k, baseline="none", center=True))
    same(centred, (1 - k / 16) * advantages(g, MaxAtK(k=k, baseline="subset_loo")))


@pytest.mark.parametrize("k", [2, 7, 15])
def test_analytic_pass_at_k_is_the_centred_estimate_over_its_deviation(k: int) -> None:
    n = 16
    g = np.array([[1.0] * c + [0.0] * (n - c) for c in range(n + 1)])
    solved = max_at_k(g, k)[:, None]
    shape = advantages(g, {"kind": "pass_at_k_analytic", "k": k})
    centred = advantages(g, MaxAtK(k=k, baseline="none", center=True))
    same(shape * np.sqrt(solved * (1 - solved)), np.where(solved < 1, centred * n / k, 0.0))


@pytest.mark.parametrize("baseline", BASELINES)
def test_only_subset_loo_sums_to_zero_and_only_none_and_loo_depend_on_shifts(baseline: Baseline) -> None:
    g = groups(4)
    a, shifted = (advantages(x, MaxAtK(k=5, baseline=baseline)) for x in (g, g + 10))
    expected_shift = {"none": 10 * 5 / 16, "loo": 10 * (5 / 16 - 5 / 15)}.get(baseline, 0.0)
    np.testing.assert_allclose(shifted - a, expected_shift, atol=1e-12)
    assert (np.abs(a.sum(axis=-1)) < 1e-12).all() == (baseline == "subset_loo")


@given(seed=st.integers(0, 1000), k=st.integers(2, 15))
def test_distinct_answers_make_maj_at_k_the_mean(seed: int, k: int) -> None:
    """With all votes tied, every subset's value is its mean reward."""
    g = groups(seed)
    answers = np.tile(np.arange(16), (len(g), 1))
    same(advantages(g, MajAtK(k=k), answers=answers), advantages(g, Mean()))
    same(maj_at_k(answers, g, k), g.mean(axis=-1))


def test_softmax_runs_from_the_mean_to_the_max() -> None:
    g = groups(6)
    same(advantages(g, Softmax(beta=0.0)), advantages(g, Mean()))
    distinct = groups(6)[:20]
    np.testing.assert_allclose(advantages(distinct, Softmax(beta=1e5)), advantages(distinct, MaxAtK(k=16)), atol=1e-9)


@given(seed=st.integers(0, 1000), k=st.integers(1, 15))
def test_advantages_are_permuted_with_their_samples(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    g, log_w = groups(seed, rows=3), rng.normal(size=(9, 16))
    order = rng.permutation(16)
    for objective in (MaxAtK(k=k), MaxAtK(k=k, baseline="loo", companion_weights="exact")):
        a = advantages(g, objective, log_weights=log_w)
        np.testing.assert_allclose(
            advantages(g[:, order], objective, log_weights=log_w[:, order]), a[:, order], atol=1e-9
        )


def test_tied_samples_get_equal_advantages() -> None:
    a = advantages([0.0, 1.0, 1.0, 1.0, 2.0, 2.0], MaxAtK(k=3))
    assert a[1] == a[2] == a[3]
    assert a[4] == a[5]
