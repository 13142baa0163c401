"""Schedules: stages by step, k by solve rate, and live changes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.unit.objectives.strategies import given
from volley.objectives import (
    AdaptiveK,
    MaxAtK,
    Mean,
    PassAtKAnalytic,
    Schedule,
    Softmax,
    SolveRate,
    adaptive_k,
    advantages,
    check_schedule,
    resolve,
    visited,
    with_changes,
)

PKPO = Schedule.model_validate({"stages": [{"at": 1500, "set": {"k": 1}}]})


def test_the_objective_is_constant_by_default() -> None:
    objective = MaxAtK(k=8)
    assert resolve(objective, Schedule(), 10**6) == objective


def test_pkpo_anneals_to_the_mean_at_step_1500() -> None:
    objective = MaxAtK(k=8)
    assert resolve(objective, PKPO, 1499).model_dump()["k"] == 8
    annealed = resolve(objective, PKPO, 1500)
    g = np.random.default_rng(0).normal(size=(3, 8))
    np.testing.assert_allclose(advantages(g, annealed), advantages(g, Mean()))


def test_stages_accumulate_and_live_changes_come_last() -> None:
    schedule = Schedule.model_validate(
        {"stages": [{"at": 10, "set": {"k": 4, "center": True}}, {"at": 20, "set": {"baseline": "none"}}]}
    )
    objective = MaxAtK(k=8)
    assert resolve(objective, schedule, 9) == objective
    assert resolve(objective, schedule, 10) == MaxAtK(k=4, center=True)
    assert resolve(objective, schedule, 25) == MaxAtK(k=4, center=True, baseline="none")
    assert resolve(objective, schedule, 25, {"k": 2}) == MaxAtK(k=2, center=True, baseline="none")


def test_a_new_kind_keeps_the_shared_fields() -> None:
    objective = MaxAtK(k=8, baseline="loo", center=True, normalize="std")
    assert with_changes(objective, {"kind": "softmax", "beta": 2.0}) == Softmax(beta=2.0, center=True, normalize="std")
    assert with_changes(objective, {"kind": "max_at_k", "k": 3}).model_dump()["baseline"] == "loo"


def test_a_change_is_validated() -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        with_changes(MaxAtK(k=8), {"beta": 2.0})
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        with_changes(MaxAtK(k=8), {"k": 0})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"stages": [{"at": 5, "set": {"k": 17}}]}, "stage at: 5: max_at_k with k=17 needs n >= 17"),
        ({"stages": [{"at": 5, "set": {"baseline": "none", "center": True}}]}, "stage at: 5: .*zero for every group"),
        ({"stages": [{"at": 5, "set": {"beta": 1.0}}]}, "stage at: 5: max_at_k.beta: Extra inputs"),
        ({"stages": [{"at": 5, "set": {"kind": "mean"}}], "adaptive_k": {}}, "drop adaptive_k or write kind: max_at_k"),
        ({"adaptive_k": {"min_k": 17}}, "too large for n=16"),
    ],
)
def test_a_schedule_is_checked_at_every_stage(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(MaxAtK(k=16), Schedule.model_validate(schedule), 16)


def test_a_good_schedule_passes() -> None:
    check_schedule(MaxAtK(k=16), Schedule.model_validate({**PKPO.model_dump(), "adaptive_k": {"max_k": 8}}), 16)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"stages": [{"at": 5, "set": {"k": 2}}, {"at": 5, "set": {"k": 1}}]}, "rising order"),
        ({"stages": [{"at": -1, "set": {"k": 2}}]}, "greater than or equal to 0"),
        ({"stages": [{"at": 1, "set": {}}]}, "at least 1 item"),
        ({"adaptive_k": {"min_k": 5, "max_k": 4}}, "swap them"),
        ({"adaptive_k": {"decay": 1.5}}, "less than or equal to 1"),
        ({"k": 3}, "Extra inputs"),
    ],
)
def test_malformed_schedules_are_rejected(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.model_validate(value)


@given(solved=st.integers(0, 16), objective_k=st.integers(1, 16))
def test_adaptive_k_is_the_inverse_solve_rate(solved: int, objective_k: int) -> None:
    rate = SolveRate(solved, 16)
    (k,) = adaptive_k(MaxAtK(k=objective_k), AdaptiveK(), [rate], 16)
    assert k == (16 if solved == 0 else np.clip(round(16 / solved), 1, 16))


def test_adaptive_k_respects_bounds_and_unseen_prompts() -> None:
    rates = [None, SolveRate(0, 4), SolveRate(4, 4), SolveRate(1, 3), SolveRate(0, 0)]
    np.testing.assert_array_equal(adaptive_k(MaxAtK(k=5), AdaptiveK(min_k=2, max_k=6), rates, 8), [5, 6, 2, 3, 5])
    np.testing.assert_array_equal(adaptive_k(PassAtKAnalytic(k=5), AdaptiveK(), rates, 8), [5, 7, 1, 3, 5])


def test_adaptive_k_feeds_advantages() -> None:
    g = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    rule = AdaptiveK()
    rates = [visited(None, row.tolist(), rule) for row in g]
    k = adaptive_k(MaxAtK(k=2), rule, rates, 4)
    np.testing.assert_array_equal(k, [4, 1])
    expected = [advantages(g[0], MaxAtK(k=4)), advantages(g[1], Mean())]
    np.testing.assert_allclose(advantages(g, MaxAtK(k=2), k=k), expected)


def test_solve_rates_decay() -> None:
    rule = AdaptiveK(decay=0.5)
    first = visited(None, [1.0, 0.0, 0.0, 0.0], rule)
    second = visited(first, [1.0, 1.0, 1.0, 1.0], rule)
    assert first == SolveRate(1, 4)
    assert second == SolveRate(4.5, 6)
    assert second.value == 0.75
    assert visited(None, [1.0, -1.0], rule).value == 0.5  # +1/-1 rewards
    assert visited(second, [], rule).value == second.value  # a group with no valid sample changes nothing
