"""Batches: leading dimensions, masks, k per group, reports, and invalid arguments."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.unit.objectives.strategies import given
from volley.objectives import DropReason, MajAtK, MaxAtK, Mean, advantage_report, advantages, maj_at_k, max_at_k

OBJECTIVES: list[dict[str, Any]] = [
    {"kind": "mean"},
    {"kind": "max_at_k", "k": 4},
    {"kind": "max_at_k", "k": 4, "center": True, "normalize": "std"},
    {"kind": "max_at_k", "k": 3, "baseline": "loo"},
    {"kind": "max_at_k", "k": 3, "baseline": "subset_loo"},
    {"kind": "max_at_k", "k": 4, "companion_weights": "exact", "weight_cap": 2.0},
    {"kind": "max_at_k", "k": 4, "baseline": "none", "companion_weights": "self_normalised"},
    {"kind": "maj_at_k", "k": 4},
    {"kind": "maj_at_k", "k": 4, "companion_weights": "exact"},
    {"kind": "softmax", "beta": 1.5},
    {"kind": "pass_at_k_analytic", "k": 3},
    {"kind": "maxrl"},
    {"kind": "risk_sensitive", "beta": -0.5},
]


def ids(objective: dict[str, Any]) -> str:
    return "-".join(str(value) for value in objective.values())


def batch(seed: int, *shape: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 2, shape).astype(float)
    return {"rewards": rewards, "answers": np.where(rewards == 1, 0, rng.integers(1, 4, shape)),
            "log_weights": rng.normal(size=shape)}  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES, ids=ids)
def test_leading_dimensions_are_batch_dimensions(objective: dict[str, Any]) -> None:
    data = batch(0, 3, 2, 7)
    whole = advantages(objective=objective, **data)
    assert whole.shape == (3, 2, 7)
    assert whole.dtype == np.float64
    for index in np.ndindex(3, 2):
        one = advantages(objective=objective, **{key: value[index] for key, value in data.items()})
        np.testing.assert_allclose(one, whole[index], rtol=1e-12, atol=1e-15)


def test_leading_dimensions_of_metrics_are_batches() -> None:
    data = batch(3, 3, 2, 7)
    for log_weights in (None, data["log_weights"]):
        whole = max_at_k(data["rewards"], 4, log_weights=log_weights)
        assert whole.shape == (3, 2)
        for index in np.ndindex(3, 2):
            one = max_at_k(data["rewards"][index], 4, log_weights=None if log_weights is None else log_weights[index])
            np.testing.assert_allclose(one, whole[index], rtol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=ids)
def test_a_masked_sample_counts_as_absent(objective: dict[str, Any]) -> None:
    data = batch(1, 40, 7)
    valid = np.random.default_rng(2).random((40, 7)) < 0.7
    masked = {key: np.where(valid, value, 99) for key, value in data.items()}
    masked["rewards"] = np.where(valid, data["rewards"], np.nan)
    masked["log_weights"] = np.where(valid, data["log_weights"], np.inf)
    report = advantage_report(objective=objective, valid=valid, **masked)
    assert not report.advantages[~valid].any()
    for row in range(40):
        left = int(valid[row].sum())
        assert ((row,) in report.dropped) == (left < 2)
        if left < 2:
            assert not report.advantages[row].any()
            assert report.k[row] == 0
            continue
        smaller = dict(objective)
        if "k" in objective:
            spare = objective["kind"] == "pass_at_k_analytic" or objective.get("baseline") in ("loo", "subset_loo")
            smaller["k"] = max(1, min(objective["k"], left - spare))
            assert report.k[row] == smaller["k"]
        alone = advantages(objective=smaller, **{key: value[row, valid[row]] for key, value in data.items()})
        np.testing.assert_allclose(report.advantages[row, valid[row]], alone, rtol=1e-12, atol=1e-15)


def test_a_centred_no_baseline_group_keeps_k_below_its_size() -> None:
    objective = MaxAtK(k=3, baseline="none", center=True)
    report = advantage_report([1.0, 0.0, 0.0, 5.0], objective, valid=[True, True, True, False])
    assert report.k == 2
    assert report.advantages.any()


@given(seed=st.integers(0, 100))
def test_k_may_differ_by_group(seed: int) -> None:
    data = batch(seed, 12, 6)
    k = np.random.default_rng(seed).integers(1, 7, 12)
    mixed = advantages(data["rewards"], MaxAtK(k=2), k=k)
    alone = [advantages(g, MaxAtK(k=int(group_k))) for g, group_k in zip(data["rewards"], k, strict=True)]
    np.testing.assert_allclose(mixed, alone, rtol=1e-13)
    voted = advantages(data["rewards"], MajAtK(k=2), answers=data["answers"], k=k)
    voted_alone = [
        advantages(g, MajAtK(k=int(group_k)), answers=a)
        for g, a, group_k in zip(data["rewards"], data["answers"], k, strict=True)
    ]
    np.testing.assert_allclose(voted, voted_alone, rtol=1e-12, atol=1e-15)


def test_report_names_dropped_groups_and_counts_truncated_weights() -> None:
    report = advantage_report(
        [[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], [[1.0, 1.0, 1.0], [0.0, 1.0, 5.0]]],
        MaxAtK(k=2, companion_weights="exact", weight_cap=2.0),
        log_weights=np.log(np.array([[[1, 3, 1], [9, 9, 9]], [[2, 2, 2.5], [1, 1, 9]]])),
        valid=[[[True, True, True], [False, True, False]], [[True, True, True], [True, True, False]]],
    )
    assert report.dropped == {(0, 1): DropReason.TOO_FEW_VALID}
    np.testing.assert_array_equal(report.k, [[2, 0], [2, 2]])
    assert report.truncated_share == 2 / 8  # share of the valid samples of kept groups
    assert report.live_group_fraction == 2 / 4


def test_nothing_is_truncated_without_a_cap_or_without_a_group() -> None:
    objective = MaxAtK(k=2, companion_weights="exact")
    report = advantage_report([[0.0, 1.0, 2.0]], objective, log_weights=[[0.0, 9.0, 0.0]])
    assert report.truncated_share == 0.0
    empty = advantage_report([[0.0, 1.0]], objective, log_weights=[[0.0, 9.0]], valid=[[True, False]])
    assert empty.truncated_share == 0.0
    assert empty.dropped == {(0,): DropReason.TOO_FEW_VALID}


def test_k_of_a_group_shrinks_to_one_at_most() -> None:
    report = advantage_report(
        [[3.0, 1.0, 7.0, 7.0]], MaxAtK(k=3, baseline="subset_loo"), valid=[[True, True, False, False]]
    )
    np.testing.assert_array_equal(report.k, [1])  # this baseline needs a sample beyond k
    np.testing.assert_allclose(report.advantages[0, :2], advantages([3.0, 1.0], Mean()), rtol=1e-15)


def test_a_group_with_penalties_only_is_live() -> None:
    """Advantages of one sign, and of either sign, are a signal."""
    objective = MaxAtK(k=2, baseline="none")
    report = advantage_report([[-1.0, -2.0, -3.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], objective)
    assert (report.advantages[0] < 0).all()
    assert report.live_group_fraction == 2 / 3


def test_empty_batches_and_single_groups() -> None:
    assert advantages(np.zeros((0, 4)), Mean()).shape == (0, 4)
    assert advantages(np.zeros((2, 0, 4)), MajAtK(k=2), answers=np.zeros((2, 0, 4), dtype=int)).shape == (2, 0, 4)
    assert max_at_k(np.zeros((0, 4)), 2).shape == (0,)
    assert maj_at_k(np.zeros((0, 4), dtype=int), np.zeros((0, 4)), 2).shape == (0,)
    assert isinstance(max_at_k([0.0, 1.0], 2), float)
    report = advantage_report([1.0, 2.0], Mean(), valid=[True, False])
    assert report.dropped == {(): DropReason.TOO_FEW_VALID}
    assert advantage_report(np.zeros((0, 4)), Mean()).live_group_fraction == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": 1.0}, "last dimension of samples"),
        ({"rewards": [1.0, float("nan"), 0.0]}, "not finite; mask such samples"),
        ({"rewards": [1.0, float("inf"), 0.0]}, "not finite; mask such samples"),
        ({"valid": [True, False]}, r"valid has shape \(2,\), rewards have \(3,\)"),
        ({"log_weights": [0.0]}, "log_weights has shape"),
        ({"log_weights": [0.0, float("nan"), 0.0]}, "log-weight is nan"),
        ({"log_weights": [0.0, float("inf"), 0.0]}, r"log-weight is nan or \+inf"),
        ({"answers": [1, 2]}, "answers has shape"),
        ({"k": 4}, "needs n >= 4 samples, got n=3"),
        ({"k": 0}, "greater than or equal to 1"),
        ({"objective": {"kind": "mean"}, "k": 2}, "has no k; leave k= out"),
        ({"rewards": [1.0]}, "nothing to compare with"),
    ],
)
def test_invalid_arguments_are_rejected_with_advice(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"rewards": [1.0, 0.0, 2.0], "objective": {"kind": "max_at_k", "k": 2}}
    with pytest.raises(ValueError, match=message):
        advantages(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": [1, 0, 1]}, r"write valid.astype\(bool\)"),
        ({"answers": [0.5, 1.0, 2.0]}, "answers must be integer ids"),
        ({"k": 1.5}, "k must be integers"),
    ],
)
def test_wrong_types_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        advantages([1.0, 0.0, 2.0], MaxAtK(k=2), **change)


def test_a_weight_of_zero_is_valid() -> None:
    """A log-weight of -inf removes a companion from every subset and does not change its own advantage."""
    objective = MaxAtK(k=2, companion_weights="exact")
    a = advantages([0.0, 1.0, 3.0], objective, log_weights=[0.0, -np.inf, 0.0])
    np.testing.assert_allclose(a, [0.0, 1 / 3, 3 / 3])
    zeros = advantages([0.0, 1.0, 3.0], MaxAtK(k=3, companion_weights="self_normalised"), log_weights=[-np.inf] * 3)
    np.testing.assert_array_equal(zeros, [0.0, 0.0, 0.0])
    voted = advantages(
        [0.0, 0.0, 1.0], MajAtK(k=3, companion_weights="exact"), answers=[0, 0, 1], log_weights=[-np.inf, 0.0, 0.0]
    )
    np.testing.assert_allclose(voted, [-0.5, 0.0, 0.0])  # only sample 0 has two companions with a nonzero weight
