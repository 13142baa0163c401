"""Sums of f@k over several k: compared with enumeration in rational arithmetic, and with MaxRL and TailRL."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.unit.objectives import oracle
from tests.unit.objectives.strategies import Case, VoteCase, cases, close, floats, given, logs, size_of, vote_cases
from tests.unit.objectives.strategies import split_votes as split
from volley.objectives import MajAtK, MaxAtK, MaxRL, Mean, advantage_report, advantages, check_objective
from volley.objectives.spec import Baseline

Weights = dict[int, Fraction]
BASELINES: list[Baseline] = ["none", "loo", "subset_loo", "loo_minus_one"]
SPARE = {"none": 0, "loo": 1, "subset_loo": 1, "loo_minus_one": 0}
some_weights = st.builds(Fraction, st.integers(0, 12), st.integers(1, 7))


def drawn(data: st.DataObject, largest: int) -> Weights:
    """A weight for one or more k up to the largest; some weights are 0, but not all."""
    ks = data.draw(st.lists(st.integers(1, largest), min_size=1, max_size=largest, unique=True))
    weights = {k: data.draw(some_weights) for k in ks}
    return weights if any(weights.values()) else {**weights, ks[0]: Fraction(1, 3)}


def as_floats(weights: Weights) -> dict[int, float]:
    return {k: float(weight) for k, weight in weights.items()}


def one_k(baseline: Baseline, f: Any, y: Any, k: int, w: list[Fraction] | None = None) -> list[Fraction]:
    """The estimate for one k by enumeration; with one try, every baseline is REINFORCE leave-one-out."""
    if k == 1:
        return oracle.reinforce_loo([f([each]) for each in y])
    weight = oracle.product_weight(w) if w else oracle.unweighted
    match baseline:
        case "none":
            return oracle.no_baseline(f, y, k, weight)
        case "loo_minus_one":
            return oracle.loo_minus_one(f, y, k, weight)
        case "loo":
            return oracle.loo(f, y, k, w)
        case "subset_loo":
            return oracle.subset_loo(f, y, k, w)


def total(weights: Weights, terms: dict[int, list[Fraction]]) -> list[Fraction]:
    return [
        sum((weights[k] * terms[k][i] for k in weights), oracle.ZERO) for i in range(len(next(iter(terms.values()))))
    ]


def scale_of(weights: Weights, g: list[Fraction], w: list[Fraction] | None = None) -> float:
    return sum(float(weight) * size_of(g, w, k) for k, weight in weights.items())


@pytest.mark.parametrize("baseline", BASELINES)
@given(case=cases(spare=1), data=st.data())
def test_a_sum_is_the_sum_of_its_enumerated_terms(baseline: Baseline, case: Case, data: st.DataObject) -> None:
    weights = drawn(data, len(case.g) - SPARE[baseline])
    exact = total(weights, {k: one_k(baseline, oracle.best, case.g, k) for k in weights})
    actual = advantages(floats(case.g), MaxAtK(weights=as_floats(weights), baseline=baseline))
    close(actual, exact, scale_of(weights, case.g))


@pytest.mark.parametrize("baseline", BASELINES)
@given(case=cases(spare=1, max_n=6), data=st.data())
def test_exact_companion_weights(baseline: Baseline, case: Case, data: st.DataObject) -> None:
    weights = drawn(data, len(case.g) - SPARE[baseline])
    exact = total(weights, {k: one_k(baseline, oracle.best, case.g, k, case.w) for k in weights})
    objective = MaxAtK(weights=as_floats(weights), baseline=baseline, companion_weights="exact")
    close(advantages(floats(case.g), objective, log_weights=logs(case.w)), exact, scale_of(weights, case.g, case.w))


@pytest.mark.parametrize("companion_weights", ["exact", "self_normalised", "first_order"])
@pytest.mark.parametrize("cap", [None, 1.5])
@given(case=cases(), data=st.data())
def test_every_kind_of_companion_weight_is_linear(
    companion_weights: Any, cap: float | None, case: Case, data: st.DataObject
) -> None:
    """The sum's estimate is the sum of the estimates for one k, which have their own oracles."""
    weights = drawn(data, len(case.g))
    fields: dict[str, Any] = {"companion_weights": companion_weights, "weight_cap": cap}
    g, log_w = floats(case.g), logs(case.w)
    alone = {k: advantages(g, MaxAtK(k=k, **fields), log_weights=log_w) for k in weights}
    expected = sum(float(weight) * alone[k] for k, weight in weights.items())
    actual = advantages(g, MaxAtK(weights=as_floats(weights), **fields), log_weights=log_w)
    size = sum(float(weight) * float(np.abs(alone[k]).max()) for k, weight in weights.items())
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12 * size)


@pytest.mark.parametrize("baseline", ["none", "loo", "subset_loo"])
@given(case=cases(spare=1, max_n=6), data=st.data())
def test_self_normalised_sums_are_linear_with_every_baseline(
    baseline: Baseline, case: Case, data: st.DataObject
) -> None:
    weights = drawn(data, len(case.g) - 1)
    fields: dict[str, Any] = {"companion_weights": "self_normalised", "baseline": baseline}
    g, log_w = floats(case.g), logs(case.w)
    alone = {k: advantages(g, MaxAtK(k=k, **fields), log_weights=log_w) for k in weights}
    expected = sum(float(weight) * alone[k] for k, weight in weights.items())
    actual = advantages(g, MaxAtK(weights=as_floats(weights), **fields), log_weights=log_w)
    size = sum(float(weight) * float(np.abs(alone[k]).max()) for k, weight in weights.items())
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12 * size)


@given(case=vote_cases(max_n=6), data=st.data())
def test_votes(case: VoteCase, data: st.DataObject) -> None:
    weights, (answers, rewards) = drawn(data, len(case.y)), split(case.y)
    g = [reward for _, reward in case.y]
    exact = total(weights, {k: one_k("loo_minus_one", oracle.voted, case.y, k) for k in weights})
    close(advantages(rewards, MajAtK(weights=as_floats(weights)), answers=answers), exact, scale_of(weights, g))
    exact = total(weights, {k: one_k("loo_minus_one", oracle.voted, case.y, k, case.w) for k in weights})
    objective = MajAtK(weights=as_floats(weights), companion_weights="exact")
    actual = advantages(rewards, objective, answers=answers, log_weights=logs(case.w))
    close(actual, exact, scale_of(weights, g, case.w))


@pytest.mark.parametrize("kind", [MaxAtK, MajAtK])
@pytest.mark.parametrize("n", [2, 5, 9])
def test_harmonic_weights_are_the_inverse_of_k(kind: type[MaxAtK] | type[MajAtK], n: int) -> None:
    rng = np.random.default_rng(n)
    answers = rng.integers(0, 3, (20, n))
    g = answers.astype(float)
    written = advantages(g, kind(weights={k: 1 / k for k in range(1, n + 1)}), answers=answers)
    np.testing.assert_array_equal(advantages(g, kind(weights="harmonic", order=n), answers=answers), written)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_one_weight_is_a_multiple_of_one_k(baseline: Baseline, k: int) -> None:
    g = np.random.default_rng(0).integers(-2, 3, (20, 6)).astype(float)
    weighted = advantages(g, MaxAtK(weights={k: 2.5}, baseline=baseline))
    np.testing.assert_allclose(weighted, 2.5 * advantages(g, MaxAtK(k=k, baseline=baseline)), rtol=1e-12, atol=1e-15)
    if k == 1:
        np.testing.assert_allclose(weighted, 2.5 * advantages(g, Mean()), rtol=1e-12, atol=1e-15)


# ---- MaxRL and TailRL -----------------------------------------------------------------------------------------


def maxrl(r: list[Fraction]) -> list[Fraction]:
    """arXiv 2602.02710 over n: the average score over the c successes, less 1/n for every sample."""
    c, n = sum(r), len(r)
    return [reward / c - Fraction(1, n) if c else oracle.ZERO for reward in r]


def tail(g: list[Fraction]) -> list[Fraction]:
    """`sum_{j<=i} (g_(j) - g_(j-1)) / (n - j + 1)` over ascending order with `g_(0) = 0` (arXiv 2609.02987 over n)."""
    n, order = len(g), sorted(range(len(g)), key=g.__getitem__)
    a, running, before = [oracle.ZERO] * n, oracle.ZERO, oracle.ZERO
    for rank, i in enumerate(order):
        running += (g[i] - before) / (n - rank)
        a[i], before = running, g[i]
    return a


@given(r=st.lists(st.sampled_from([oracle.ZERO, oracle.ONE]), min_size=2, max_size=9))
def test_subset_loo_of_order_n_minus_one_is_maxrl(r: list[Fraction]) -> None:
    n = len(r)
    actual = advantages(floats(r), MaxAtK(weights="harmonic", order=n - 1, baseline="subset_loo"))
    close(actual, maxrl(r))
    np.testing.assert_allclose(n * actual, advantages(floats(r), MaxRL()), rtol=1e-11, atol=1e-12)


@given(case=cases())
def test_subset_loo_of_order_n_minus_one_is_centred_tailrl(case: Case) -> None:
    """With any rewards, negative ones too: a shift changes only what centring removes."""
    objective = MaxAtK(weights="harmonic", order=len(case.g) - 1, baseline="subset_loo")
    close(advantages(floats(case.g), objective), oracle.centred(tail(case.g)), len(case.g) * size_of(case.g))


@given(case=cases())
def test_the_default_of_order_n_is_tailrl_less_the_mean_of_the_others(case: Case) -> None:
    """The control variate of one try is `mean(g_-i) / n`; on 0/1 rewards the rest is MaxRL's `r_i / c`."""
    n = len(case.g)
    others = [sum(oracle.without(case.g, i), oracle.ZERO) / (n - 1) for i in range(n)]
    exact = [a - mean / n for a, mean in zip(tail(case.g), others, strict=True)]
    actual = advantages(floats(case.g), MaxAtK(weights="harmonic", order=n))
    close(actual, exact, n * size_of(case.g))


# ---- shifts, ties, masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["subset_loo", "loo_minus_one"])
@given(case=cases(), data=st.data())
def test_a_shift_of_all_rewards_changes_nothing(baseline: Baseline, case: Case, data: st.DataObject) -> None:
    """One try included, so that rewards of -1 and 1 are as good as 0 and 2."""
    n = len(case.g)
    objective = MaxAtK(weights={1: 0.5, **as_floats(drawn(data, n - SPARE[baseline]))}, baseline=baseline)
    g = floats(case.g)
    np.testing.assert_allclose(advantages(g + 7, objective), advantages(g, objective), atol=1e-10 * size_of(case.g))


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("companion_weights", ["none", "exact"])
def test_equal_rewards_get_equal_advantages(baseline: Baseline, companion_weights: Any) -> None:
    g = np.random.default_rng(1).integers(-2, 2, (50, 9)) / 10
    objective = MaxAtK(weights="harmonic", order=8, baseline=baseline, companion_weights=companion_weights)
    a = advantages(g, objective, log_weights=np.full(g.shape, 0.3))
    for row_n, a_n in zip(g, a, strict=True):
        for value in np.unique(row_n):
            tied = a_n[row_n == value]
            if companion_weights == "none":
                assert (tied == tied[0]).all()
            np.testing.assert_allclose(tied, tied[0], rtol=1e-12, atol=1e-14)


def test_a_k_above_the_valid_samples_counts_as_their_number() -> None:
    rng = np.random.default_rng(2)
    g, valid = rng.normal(size=(30, 8)), rng.random((30, 8)) < 0.6
    objective = MaxAtK(weights={1: 0.5, 3: 0.25, 6: 1.0, 8: 2.0})
    report = advantage_report(g, objective, valid=valid)
    assert not report.advantages[~valid].any()
    fitted = {2: {1: 0.5, 2: 3.25}, 3: {1: 0.5, 3: 3.25}, 4: {1: 0.5, 3: 0.25, 4: 3.0}, 5: {1: 0.5, 3: 0.25, 5: 3.0},
              6: {1: 0.5, 3: 0.25, 6: 3.0}, 7: {1: 0.5, 3: 0.25, 6: 1.0, 7: 2.0}}  # fmt: skip
    seen = set()
    for row, keep_n in enumerate(valid):
        left = int(keep_n.sum())
        if left in fitted:
            alone = advantages(g[row, keep_n], MaxAtK(weights=fitted[left]))
            np.testing.assert_allclose(report.advantages[row, keep_n], alone, rtol=1e-12, atol=1e-15)
            assert report.k[row] == left
            seen.add(left)
    assert len(seen) >= 4


def test_with_a_leave_one_out_baseline_the_last_valid_sample_is_spare() -> None:
    valid = [True, True, True, True, False, False]
    g = [3.0, -1.0, 0.0, 5.0, 9.0, 9.0]
    fitted = MaxAtK(weights={1: 1.0, 3: 1.5}, baseline="subset_loo")
    masked = advantage_report(g, MaxAtK(weights={1: 1.0, 4: 1.0, 5: 0.5}, baseline="subset_loo"), valid=valid)
    np.testing.assert_allclose(masked.advantages[:4], advantages(g[:4], fitted), rtol=1e-13)
    assert masked.k == 3


@pytest.mark.parametrize("center", [False, True])
def test_center_and_normalize_apply_to_the_sum(center: bool) -> None:
    g = np.random.default_rng(3).normal(size=(10, 6))
    expected = advantages(g, MaxAtK(weights={1: 0.5, 4: 0.5})) / g.std(axis=-1, keepdims=True)
    if center:
        expected -= expected.mean(axis=-1, keepdims=True)
    objective = MaxAtK(weights={1: 0.5, 4: 0.5}, center=center, normalize="std")
    np.testing.assert_allclose(advantages(g, objective), expected, rtol=1e-11, atol=1e-13)
    assert not advantages(np.full((2, 6), 0.1), objective).any()


def test_large_groups_keep_their_digits() -> None:
    """The default of order n is TailRL less the mean of the others, at n = 256 in integers."""
    n, rng = 256, np.random.default_rng(4)
    g = [Fraction(int(x), 2**20) for x in rng.integers(-(2**20), 2**20, n)]
    mean = sum(g, oracle.ZERO) / n
    exact = [a - (n * mean - x) / (n - 1) / n for a, x in zip(tail(g), g, strict=True)]
    actual = advantages(floats(g), MaxAtK(weights="harmonic", order=n))
    np.testing.assert_allclose(actual, floats(exact), rtol=1e-9, atol=1e-13)


# ---- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"write k: 8, or weights: \{1: 0.5, 8: 0.5\}"),
        ({"k": 8, "weights": {8: 1.0}}, "remove k, or write k: 8 without weights"),
        ({"weights": {}}, "weights is empty.*write a mapping"),
        ({"weights": {1: -0.5}}, r"the weight -0.5 of k=1 is not a number of 0 or more"),
        ({"weights": {1: float("nan")}}, "the weight nan of k=1"),
        ({"weights": {1: float("inf")}}, "the weight inf of k=1"),
        ({"weights": {1: "much"}}, "the weight 'much' of k=1"),
        ({"weights": {1: True}}, "the weight True of k=1"),
        ({"weights": {1: 0.0, 8: 0}}, "all weights are 0"),
        ({"weights": {0: 1.0}}, "0 is not a number of tries"),
        ({"weights": {-2: 1.0}}, "-2 is not a number of tries"),
        ({"weights": {1.5: 1.0}}, "1.5 is not a number of tries"),
        ({"weights": {True: 1.0}}, "True is not a number of tries"),
        ({"weights": {"two": 1.0}}, "'two' is not a number of tries"),
        ({"weights": {8: 0.5, "8": 0.5}}, "k=8 has two weights: write their sum"),
        ({"weights": [0.5, 0.5]}, "is not a mapping of weights: write a mapping from k to its weight"),
        ({"weights": "geometric"}, "'geometric' is not a mapping of weights: .*an objective also takes harmonic"),
        ({"weights": "harmonic"}, "write order: 16"),
        ({"weights": "harmonic", "order": 0}, "greater than or equal to 1"),
        ({"weights": {1: 1.0}, "order": 4}, "remove order, or write weights: harmonic"),
        ({"k": 4, "order": 4}, "remove order, or write weights: harmonic"),
        ({"k": 4, "weights": "harmonic", "order": 4}, "remove k, or write k: 4 without weights"),
    ],
)
def test_weights_without_meaning_are_rejected(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_objective({"kind": kind, **fields}, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"weights": {1: 0.5, 9: 0.5}},
            "with weights up to k=9 needs n >= 9 samples, got n=8; remove the weights above",
        ),
        ({"weights": "harmonic", "order": 9}, "with order=9 needs n >= 9 samples, got n=8; lower order or raise n"),
        ({"weights": {1: 1, 8: 1}, "baseline": "loo"}, "write baseline: loo_minus_one, or weights of k up to 7"),
        ({"weights": "harmonic", "order": 8, "baseline": "subset_loo"}, "loo_minus_one, or order: 7 or less"),
        ({"weights": {1: 1, 8: 1}, "baseline": "none", "center": True}, "or weights of k up to 7"),
    ],
)
def test_weights_that_do_not_fit_the_group_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_objective({"kind": "max_at_k", **fields}, 8)


def test_a_weight_of_zero_needs_no_samples() -> None:
    check_objective(MaxAtK(weights={2: 1.0, 64: 0.0}), 8)


def test_k_of_a_group_cannot_replace_weights() -> None:
    with pytest.raises(ValueError, match="max_at_k has weights; leave k= out"):
        advantages(np.zeros((2, 4)), MaxAtK(weights={1: 1.0, 2: 1.0}), k=2)


def test_weights_survive_json_whose_keys_are_strings() -> None:
    objective = MaxAtK(weights={8: 0.5, 1: 0.5})
    assert MaxAtK.model_validate_json(objective.model_dump_json()) == objective
    assert objective.model_dump()["weights"] == {1: 0.5, 8: 0.5}
    assert MaxAtK.model_validate({"weights": {"1": 0.5, "8": 0.5}}) == objective
