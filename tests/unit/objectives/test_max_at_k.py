"""max@k advantages and metrics, compared with enumeration of all subsets in rational arithmetic."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.unit.objectives import oracle
from tests.unit.objectives.strategies import Case, cases, close, floats, given, logs, size_of
from volley.objectives import MaxAtK, advantages, max_at_k, pass_at_k
from volley.objectives.spec import Baseline


def on_policy_oracle(baseline: Baseline, case: Case) -> list[Fraction]:
    if case.k == 1:
        return oracle.reinforce_loo(case.g)
    by_name = {
        "none": oracle.no_baseline,
        "loo": oracle.loo,
        "subset_loo": oracle.subset_loo,
        "loo_minus_one": oracle.loo_minus_one,
    }
    return by_name[baseline](oracle.best, case.g, case.k)  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("baseline", ["none", "loo_minus_one"])
@given(case=cases())
def test_advantages_up_to_k_equal_n(baseline: Baseline, case: Case) -> None:
    actual = advantages(floats(case.g), MaxAtK(k=case.k, baseline=baseline))
    close(actual, on_policy_oracle(baseline, case), size_of(case.g))


@pytest.mark.parametrize("baseline", ["loo", "subset_loo"])
@given(case=cases(spare=1))
def test_advantages_that_leave_one_out(baseline: Baseline, case: Case) -> None:
    actual = advantages(floats(case.g), MaxAtK(k=case.k, baseline=baseline))
    close(actual, on_policy_oracle(baseline, case), size_of(case.g))


@given(case=cases())
def test_metric(case: Case) -> None:
    close([max_at_k(floats(case.g), case.k)], [oracle.metric(oracle.best, case.g, case.k)], size_of(case.g))


@given(case=cases())
def test_off_policy_metric(case: Case) -> None:
    exact = oracle.metric(oracle.best, case.g, case.k, case.w)
    actual = max_at_k(floats(case.g), case.k, log_weights=logs(case.w))
    close([actual], [exact], size_of(case.g, case.w, case.k))


@given(case=cases(min_k=2))
def test_exact_companion_weights(case: Case) -> None:
    objective = MaxAtK(k=case.k, companion_weights="exact")
    actual = advantages(floats(case.g), objective, log_weights=logs(case.w))
    exact = oracle.loo_minus_one(oracle.best, case.g, case.k, oracle.product_weight(case.w))
    np.testing.assert_allclose(actual, floats(exact), rtol=1e-11)  # no term cancels, so relative


@given(case=cases(min_k=2))
def test_exact_companion_weights_without_baseline(case: Case) -> None:
    objective = MaxAtK(k=case.k, baseline="none", companion_weights="exact")
    actual = advantages(floats(case.g), objective, log_weights=logs(case.w))
    exact = oracle.no_baseline(oracle.best, case.g, case.k, oracle.product_weight(case.w))
    close(actual, exact, size_of(case.g, case.w, case.k))


@pytest.mark.parametrize("baseline", ["loo", "subset_loo"])
@given(case=cases(min_k=2, spare=1))
def test_exact_companion_weights_with_leave_one_out(baseline: Baseline, case: Case) -> None:
    objective = MaxAtK(k=case.k, baseline=baseline, companion_weights="exact")
    actual = advantages(floats(case.g), objective, log_weights=logs(case.w))
    enumerate_sets = oracle.loo if baseline == "loo" else oracle.subset_loo
    exact = enumerate_sets(oracle.best, case.g, case.k, case.w)
    close(actual, exact, size_of(case.g, case.w, case.k))


@given(case=cases(min_k=2))
def test_first_order_companion_weights(case: Case) -> None:
    """If no expanded weight is negative, the advantage is the sum over subsets; otherwise it is still not negative."""
    objective = MaxAtK(k=case.k, companion_weights="first_order")
    actual = advantages(floats(case.g), objective, log_weights=logs(case.w))
    w = case.w
    if sum(sorted(1 - each for each in w)[1 - case.k :]) > 1:  # the k - 1 lightest companions expand to less than 0
        assert (actual >= 0).all()
        w = [1 + (each - 1) / (40 * case.k) for each in w]
        actual = advantages(floats(case.g), objective, log_weights=logs(w))
    exact = oracle.loo_minus_one(oracle.best, case.g, case.k, oracle.first_order_weight(w))
    close(actual, exact, size_of(case.g, w, case.k))


def test_first_order_weights_never_turn_a_solved_sample_against_itself() -> None:
    """The only correct one of five samples has companions that became unlikely; their exact mean weight is near 0."""
    log_w = np.log([0.1, 0.12, 0.09, 0.15, 1.0])
    rewards = [0.0, 0.0, 0.0, 0.0, 1.0]
    exact = advantages(rewards, MaxAtK(k=4, companion_weights="exact"), log_weights=log_w)
    assert 0 < exact[4] < 1e-2
    first_order = advantages(rewards, MaxAtK(k=4, companion_weights="first_order"), log_weights=log_w)
    np.testing.assert_array_equal(first_order, np.zeros(5))
    # A gap whose companions' mean weight expands to a positive value still counts next to one whose value is negative.
    a = advantages([0.0, 1.0, 2.0], MaxAtK(k=2, companion_weights="first_order"), log_weights=np.log([0.1, 3.0, 1.0]))
    np.testing.assert_allclose(a, [0.0, 0.1 / 3, 0.1 / 3 + (0.1 + 3.0) / 3])
    a = advantages(
        [0.0, 1.0, 2.0, 3.0], MaxAtK(k=3, companion_weights="first_order"), log_weights=np.log([0.1, 0.1, 9, 1])
    )
    np.testing.assert_allclose(a, [0.0, 0.0, 0.0, (1 + 2 * (0.1 + 0.1 + 9 - 3) / 3) * 3 / 4])


@pytest.mark.parametrize("baseline", ["none", "loo_minus_one"])
@given(case=cases(min_k=2))
def test_self_normalised_is_exact_over_the_mean_weight(baseline: Baseline, case: Case) -> None:
    objective = MaxAtK(k=case.k, baseline=baseline, companion_weights="self_normalised")
    actual = advantages(floats(case.g), objective, log_weights=logs(case.w))
    f = oracle.no_baseline if baseline == "none" else oracle.loo_minus_one
    mean_weight = oracle.metric(lambda _: oracle.ONE, case.g, case.k, case.w)
    exact = [a / mean_weight for a in f(oracle.best, case.g, case.k, oracle.product_weight(case.w))]
    close(actual, exact, size_of(case.g, case.w, case.k) / float(mean_weight))


@pytest.mark.parametrize("baseline", ["subset_loo", "loo"])
@given(case=cases(min_k=2, spare=1))
def test_self_normalised_weights_are_divided_by_one_factor(baseline: Baseline, case: Case) -> None:
    g, log_w, k = floats(case.g), logs(case.w), case.k
    log_unit = np.log(float(oracle.metric(lambda _: oracle.ONE, case.g, k, case.w))) / k
    exact = MaxAtK(k=k, baseline=baseline, companion_weights="exact")
    normalised = MaxAtK(k=k, baseline=baseline, companion_weights="self_normalised")
    expected = advantages(g, exact, log_weights=log_w - log_unit)
    actual = advantages(g, normalised, log_weights=log_w) * np.exp(log_unit)
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10 * size_of(case.g))


@given(case=cases(min_k=2), cap=st.builds(Fraction, st.integers(1, 8), st.integers(1, 3)))
def test_weight_cap_truncates_the_companions(case: Case, cap: Fraction) -> None:
    objective = MaxAtK(k=case.k, companion_weights="exact", weight_cap=float(cap))
    actual = advantages(floats(case.g), objective, log_weights=logs(case.w))
    capped = [min(weight, cap) for weight in case.w]
    close(
        actual,
        oracle.loo_minus_one(oracle.best, case.g, case.k, oracle.product_weight(capped)),
        size_of(case.g, capped, case.k),
    )


@given(n=st.integers(1, 60), data=st.data())
def test_pass_at_k(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    np.testing.assert_allclose(pass_at_k(n, c, k), float(exact), rtol=1e-13)


@given(n=st.integers(2, 12), data=st.data())
def test_pass_at_k_is_max_at_k_on_binary_rewards(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    rewards = [1.0] * c + [0.0] * (n - c)
    np.testing.assert_allclose(max_at_k(rewards, k), pass_at_k(n, c, k), rtol=1e-13)


def test_pass_at_k_broadcasts() -> None:
    table = pass_at_k(10, np.arange(11)[:, None], np.array([1, 5, 10]))
    assert isinstance(table, np.ndarray)
    assert table.shape == (11, 3)
    np.testing.assert_allclose(table[:, 0], np.arange(11) / 10, atol=1e-15)
    np.testing.assert_array_equal(table[:, 2], [0.0] + [1.0] * 10)
    assert isinstance(pass_at_k(10, 3, 2), float)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_rejects_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


def test_pass_at_k_rejects_fractions() -> None:
    with pytest.raises(TypeError, match="integer counts"):
        pass_at_k(4, 0.5, 1)


@pytest.mark.parametrize("k", [0, 4])
def test_max_at_k_rejects_k_outside_the_group(k: int) -> None:
    with pytest.raises(ValueError, match="lower k or draw more samples"):
        max_at_k([1.0, 0.0, 2.0], k)
