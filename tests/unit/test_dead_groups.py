"""Dead groups: which rewards give no sample an advantage."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.refill import is_dead
from services.coordinator.solve_rates import SolveRates
from tests.unit.fake_roles import job
from tests.unit.ready_groups import ready
from volley.errors import JobError
from volley.objectives import advantages, parse_objective
from volley.update import PolicyUpdate

RATES = SolveRates(job(), {})


@pytest.mark.parametrize(
    ("objective", "rewards", "dead"),
    [
        ({"kind": "mean"}, [1.0, 1.0, 1.0, 1.0], True),
        ({"kind": "mean"}, [1.0, 1.0, 1.0, 0.0], False),
        ({"kind": "mean"}, [1.0, 1.0, None, 1.0], True),
        ({"kind": "mean"}, [0.0, 1.0, None, None], False),
        ({"kind": "mean"}, [1.0, None, None, None], False),  # the learner drops it, with its own reason
        ({"kind": "max_at_k", "k": 3}, [1.0, 1.0, 1.0, 0.0], True),  # every three samples have two that are right
        ({"kind": "max_at_k", "k": 3}, [1.0, 1.0, 0.0, 0.0], False),
        ({"kind": "max_at_k", "k": 3, "baseline": "none"}, [1.0, 1.0, 1.0, 1.0], False),
        ({"kind": "max_at_k", "k": 3, "baseline": "none"}, [0.0, 0.0, 0.0, 0.0], True),
        ({"kind": "maj_at_k", "k": 3}, [1.0, 1.0, 1.0, 1.0], True),
        ({"kind": "maj_at_k", "k": 3}, [1.0, 1.0, 1.0, 0.0], False),
        ({"kind": "mean", "focal": 1.0}, [1.0, 1.0, 1.0, 1.0], True),
    ],
)
def test_a_group_is_dead_if_its_objective_gives_no_sample_an_advantage(
    objective: dict[str, Any], rewards: list[float | None], dead: bool
) -> None:
    assert is_dead(ready(rewards), parse_objective(objective), RATES, PolicyUpdate()) == dead


def test_rewards_that_an_objective_does_not_take_are_the_jobs_fault() -> None:
    with pytest.raises(JobError, match="maxrl"):
        is_dead(ready([-1.0, 1.0, -1.0]), parse_objective({"kind": "maxrl"}), RATES, PolicyUpdate())


def test_samples_that_the_update_masks_do_not_make_a_group_live() -> None:
    group, mean = ready([0.0, 1.0, 1.0, 1.0], cut=(0,)), parse_objective({"kind": "mean"})
    assert not is_dead(group, mean, RATES, PolicyUpdate())
    assert is_dead(group, mean, RATES, PolicyUpdate(mask_truncated=True))


def test_best_of_k_is_dead_by_rewards_and_ranks() -> None:
    best = parse_objective({"kind": "best_of_k", "k": 2})
    assert is_dead(ready([1.0, 1.0, 1.0], ranks=[3.0, 1.0, 2.0]), best, RATES, PolicyUpdate())
    assert not is_dead(ready([1.0, 0.0, 0.0], ranks=[3.0, 1.0, 2.0]), best, RATES, PolicyUpdate())


OVER_SETS: list[dict[str, Any]] = [
    *({"kind": "max_at_k", "k": 3, "baseline": each} for each in ("none", "loo", "subset_loo", "loo_minus_one")),
    {"kind": "max_at_k", "k": 3, "companion_weights": "first_order"},
    {"kind": "max_at_k", "weights": {1: 0.5, 4: 0.5}, "companion_weights": "self_normalised"},
    {"kind": "maj_at_k", "k": 3},
    {"kind": "best_of_k", "k": 3},
]


@pytest.mark.parametrize("objective", OVER_SETS, ids=str)
@settings(deadline=None, max_examples=60)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4),
    ranks=st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=4, max_size=4),
    log_weights=st.lists(st.floats(-1.0, 1.0), min_size=4, max_size=4),
)
def test_a_dead_group_has_no_gradient_off_policy_either(
    objective: dict[str, Any], rewards: list[float], ranks: list[float], log_weights: list[float]
) -> None:
    weighed, group = parse_objective({"companion_weights": "exact", **objective}), ready(rewards, ranks=ranks)
    found = advantages(rewards, weighed, log_weights=log_weights, answers=group.scores.answers_n, ranks=ranks)
    if is_dead(group, weighed, RATES, PolicyUpdate()):
        assert not found.any()


def test_equal_rewards_can_have_a_gradient_off_policy() -> None:
    """`subset_loo` subtracts an estimate with other weights: dropping such groups would bias it."""
    on_policy = {"kind": "max_at_k", "k": 2, "baseline": "subset_loo"}
    group = ready([1.0, 1.0, 1.0, 1.0])
    assert is_dead(group, parse_objective(on_policy), RATES, PolicyUpdate())
    assert not is_dead(group, parse_objective({**on_policy, "companion_weights": "exact"}), RATES, PolicyUpdate())


# ---- the batch and the size of its step ------------------------------------------------------------------------
