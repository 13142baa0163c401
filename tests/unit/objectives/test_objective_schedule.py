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


def test_a_new_k_replaces_weights_and_new_weights_replace_k() -> None:
    halves = {"weights": {1: 0.5, 8: 0.5}}
    weighted = with_changes(MaxAtK(k=8, baseline="none"), halves)
    assert weighted == MaxAtK(weights={1: 0.5, 8: 0.5}, baseline="none")
    assert with_changes(weighted, {"k": 4}) == MaxAtK(k=4, baseline="none")
    harmonic = with_changes(weighted, {"weights": "harmonic", "order": 4})
    assert harmonic == MaxAtK(weights="harmonic", order=4, baseline="none")
    assert with_changes(harmonic, {"order": 6}) == MaxAtK(weights="harmonic", order=6, baseline="none")
    assert with_changes(harmonic, {"weights": "harmonic"}) == harmonic
    assert with_changes(harmonic, halves) == weighted
    assert with_changes(harmonic, {"k": 4}) == MaxAtK(k=4, baseline="none")
    assert with_changes(weighted, {"center": True}) == MaxAtK(weights={1: 0.5, 8: 0.5}, baseline="none", center=True)
    with pytest.raises(ValueError, match="remove k, or write k: 4 without weights"):
        with_changes(weighted, {"k": 4, **halves})
    with pytest.raises(ValueError, match="write order: 16"):
        with_changes(weighted, {"weights": "harmonic"})


def test_weights_move_in_a_straight_line() -> None:
    schedule = Schedule.model_validate({"stages": [{"at": 100, "over": 50, "set": {"weights": {1: 1.0, 4: 2.0}}}]})
    objective = MaxAtK(k=8, baseline="none")
    assert resolve(objective, schedule, 99) == objective
    assert resolve(objective, schedule, 100) == objective
    tenth = resolve(objective, schedule, 105)
    assert isinstance(tenth, MaxAtK)
    np.testing.assert_allclose(tenth.terms, [(1, 0.1), (4, 0.2), (8, 0.9)], rtol=1e-12)
    assert tenth.baseline == "none"
    last = MaxAtK(weights={1: 1.0, 4: 2.0}, baseline="none")
    assert resolve(objective, schedule, 150) == resolve(objective, schedule, 10**6) == last
    assert resolve(objective, schedule, 105, {"k": 2}) == MaxAtK(k=2, baseline="none")
    g = np.random.default_rng(0).normal(size=(3, 8))
    mixed = 0.9 * advantages(g, objective) + 0.1 * advantages(g, last)
    np.testing.assert_allclose(advantages(g, tenth), mixed, rtol=1e-11, atol=1e-14)


def test_gradual_stages_follow_each_other() -> None:
    schedule = Schedule.model_validate(
        {"stages": [{"at": 0, "over": 10, "set": {"k": 4}}, {"at": 10, "over": 10, "set": {"k": 1}}]}
    )
    check_schedule(MaxAtK(k=8), schedule, 8)
    assert resolve(MaxAtK(k=8), schedule, 5) == MaxAtK(weights={4: 0.5, 8: 0.5})
    assert resolve(MaxAtK(k=8), schedule, 10) == MaxAtK(k=4)
    assert resolve(MaxAtK(k=8), schedule, 15) == MaxAtK(weights={1: 0.5, 4: 0.5})
    assert resolve(MaxAtK(k=8), schedule, 20) == MaxAtK(k=1)
    assert schedule.turning_points == (0, 1, 10, 11, 20)


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
        ({"stages": [{"at": 5, "set": {"weights": {1: 1, 17: 1}}}]}, "stage at: 5: .*up to k=17 needs n >= 17"),
        ({"stages": [{"at": 5, "over": 9, "set": {"weights": {1: 1, 17: 1}}}]}, "stage at: 5: .*needs n >= 17"),
        (
            {"stages": [{"at": 5, "set": {"weights": {1: 1}}}], "adaptive_k": {}},
            "at step 5 has weights; drop adaptive_k",
        ),
        (
            {"stages": [{"at": 5, "over": 9, "set": {"k": 1}}], "adaptive_k": {}},
            "at step 6 has weights; drop adaptive_k",
        ),
        (
            {
                "stages": [
                    {"at": 5, "set": {"kind": "pass_at_k_analytic", "k": 4}},
                    {"at": 6, "over": 9, "set": {"k": 1}},
                ]
            },
            "stage at: 6: over: kind: pass_at_k_analytic has no weights that could change gradually; remove over",
        ),
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
        ({"stages": [{"at": 1, "over": 0, "set": {"k": 1}}]}, "greater than or equal to 1"),
        (
            {"stages": [{"at": 1, "over": 5, "set": {"k": 1, "baseline": "loo"}}]},
            "set baseline in a stage without over",
        ),
        ({"stages": [{"at": 1, "over": 5, "set": {"k": 2}}, {"at": 5, "set": {"k": 1}}]}, "write at: 6 or later"),
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


def test_adaptive_k_and_weights_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="the objective has weights; write k instead"):
        adaptive_k(MaxAtK(weights={1: 1.0, 2: 1.0}), AdaptiveK(), [None], 4)


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


def test_the_steps_at_which_fields_change() -> None:
    assert Schedule().turning_points == (0,)
    schedule = Schedule.model_validate(
        {
            "stages": [
                {"at": 5, "set": {"k": 4}},
                {"at": 9, "over": 1, "set": {"k": 2}},
                {"at": 20, "over": 3, "set": {"k": 1}},
            ]
        }
    )
    assert [stage.until for stage in schedule.stages] == [5, 10, 23]
    assert schedule.turning_points == (0, 5, 9, 10, 20, 21, 23)


def test_the_objective_of_the_job_itself_is_checked() -> None:
    with pytest.raises(ValueError, match="k=9 needs n >= 9"):
        check_schedule(MaxAtK(k=9), Schedule(), 8)


@pytest.mark.parametrize(("objective", "largest"), [(MaxAtK(k=4), 8), (PassAtKAnalytic(k=4), 7)], ids=str)
def test_the_smallest_k_of_a_prompt_may_be_the_largest_with_a_signal(objective: Any, largest: int) -> None:
    for max_k in (None, largest):
        rule = {"min_k": largest, "max_k": max_k}
        check_schedule(objective, Schedule.model_validate({"adaptive_k": rule}), 8)
    with pytest.raises(ValueError, match=f"min_k {largest + 1} is too large for n=8"):
        check_schedule(objective, Schedule.model_validate({"adaptive_k": {"min_k": largest + 1}}), 8)


def test_one_sample_of_a_prompt_is_enough_to_choose_its_k() -> None:
    rates = [SolveRate(1, 1), SolveRate(0, 0.25)]
    np.testing.assert_array_equal(adaptive_k(MaxAtK(k=5), AdaptiveK(), rates, 8), [1, 8])
