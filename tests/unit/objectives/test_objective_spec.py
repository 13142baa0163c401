"""The objective as configuration: parsing, and errors that say what to write instead."""

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from volley.objectives import MaxAtK, Mean, Objective, advantages, check_objective, leave_p_out, parse_objective
from volley.objectives.spec import weighs_companions
from volley.objectives.tries import with_tries

KINDS: list[dict[str, Any]] = [
    {"kind": "mean"},
    {"kind": "max_at_k", "k": 2},
    {"kind": "max_at_k", "weights": {1: 0.5, 8: 0.5}},
    {"kind": "maj_at_k", "k": 2},
    {"kind": "maj_at_k", "weights": "harmonic", "order": 4},
    {"kind": "best_of_k", "k": 2},
    {"kind": "softmax", "beta": 0.5},
    {"kind": "pass_at_k_analytic", "k": 2},
    {"kind": "maxrl"},
    {"kind": "risk_sensitive", "beta": -1.0},
]


@pytest.mark.parametrize("value", KINDS, ids=lambda value: value["kind"])
def test_every_kind_survives_json(value: dict[str, Any]) -> None:
    objective = parse_objective({**value, "center": True, "normalize": "std"})
    adapter: TypeAdapter[Any] = TypeAdapter(Objective)
    assert adapter.validate_json(adapter.dump_json(objective)) == objective
    assert parse_objective(objective) is objective


def test_the_default_objective_is_pkpo() -> None:
    objective = MaxAtK(k=8)
    assert (objective.baseline, objective.companion_weights, objective.weight_cap) == ("loo_minus_one", "none", None)
    assert (objective.center, objective.normalize) == (False, "none")


def test_objectives_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MaxAtK(k=8).k = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "best_of_n"}, "'best_of_n' is not known. Built in: best_of_k, maj_at_k, max_at_k"),
        ({"kind": "mean", "k": 3}, "Extra inputs are not permitted"),
        ({"kind": "pass_at_k_analytic"}, "Field required"),
        ({"kind": "max_at_k", "k": 0}, "greater than or equal to 1"),
        ({"kind": "max_at_k", "k": 2, "weight_cap": 2.0}, "drop weight_cap or write companion_weights: exact"),
        ({"kind": "max_at_k", "k": 2, "companion_weights": "exact", "weight_cap": 0}, "greater than 0"),
        ({"kind": "max_at_k", "k": 2, "companion_weights": "first_order", "baseline": "loo"}, "defined for baseline"),
        ({"kind": "maj_at_k", "k": 2, "companion_weights": "first_order"}, "'none', 'exact' or 'self_normalised'"),
        ({"kind": "maj_at_k", "k": 2, "weight_cap": 2.0}, "drop weight_cap"),
        ({"kind": "best_of_k", "k": 2, "weight_cap": 2.0}, "drop weight_cap"),
        ({"kind": "softmax", "beta": -1.0}, "greater than or equal to 0"),
        ({"kind": "softmax", "beta": float("inf")}, "finite number"),
        ({"kind": "risk_sensitive", "beta": 0}, "write kind: mean"),
    ],
)
def test_invalid_objectives_are_rejected(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_objective(value)


@pytest.mark.parametrize(
    ("value", "n", "message"),
    [
        ({"kind": "mean"}, 1, "write n: 2 or more"),
        ({"kind": "max_at_k", "k": 9}, 8, "lower k or raise n"),
        ({"kind": "maj_at_k", "k": 9}, 8, "lower k or raise n"),
        ({"kind": "max_at_k", "k": 8, "baseline": "loo"}, 8, "write baseline: loo_minus_one, or k: 7 or less"),
        ({"kind": "max_at_k", "k": 8, "baseline": "subset_loo"}, 8, "write baseline: loo_minus_one, or k: 7 or less"),
        ({"kind": "max_at_k", "k": 8, "baseline": "none", "center": True}, 8, "zero for every group"),
        ({"kind": "pass_at_k_analytic", "k": 8}, 8, "zero for every group"),
    ],
)
def test_combinations_without_meaning_or_signal_are_rejected(value: dict[str, Any], n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_objective(value, n)
    with pytest.raises(ValueError, match=message):
        advantages(np.zeros((2, n)), value)


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "max_at_k", "k": 8},
        {"kind": "max_at_k", "k": 8, "center": True},
        {"kind": "max_at_k", "k": 8, "baseline": "none"},
        {"kind": "max_at_k", "k": 7, "baseline": "none", "center": True},
        {"kind": "max_at_k", "k": 7, "baseline": "loo"},
        {"kind": "pass_at_k_analytic", "k": 7},
        {"kind": "maj_at_k", "k": 8, "center": True},
    ],
)
def test_allowed_combinations_can_carry_a_signal(value: dict[str, Any]) -> None:
    check_objective(value, 8)
    rewards = np.array([[1.0] * c + [0.0] * (8 - c) for c in range(9)])
    assert advantages(rewards, value, answers=rewards.astype(int)).any()


def test_combinations_rejected_for_lack_of_signal_have_none() -> None:
    """The reasons for rejecting k = n, checked with the formulas at the limit."""
    g = np.random.default_rng(0).normal(size=(5, 8))
    s = advantages(g, MaxAtK(k=8, baseline="none"))
    np.testing.assert_allclose(
        s, np.broadcast_to(g.max(axis=-1, keepdims=True), (5, 8))
    )  # constant, so zero after centring


def test_leave_p_out_takes_every_size_that_leaves_a_set() -> None:
    for n in (2, 8):
        assert [leave_p_out(p, n).k for p in range(1, n)] == list(range(n - 1, 0, -1))
        for p in (-1, 0, n, n + 1):
            with pytest.raises(ValueError, match="needs 1 <= p <= n - 1"):
                leave_p_out(p, n)


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k", "best_of_k"])
def test_companions_are_weighed_if_the_objective_says_so(kind: str) -> None:
    for weights in ("none", "exact", "self_normalised"):
        objective = parse_objective({"kind": kind, "k": 2, "companion_weights": weights})
        assert weighs_companions(objective) == (weights != "none")
    assert not weighs_companions(Mean())


def test_leave_p_out_is_an_alias() -> None:
    assert leave_p_out(3, 8, normalize="std") == MaxAtK(k=5, baseline="subset_loo", normalize="std")


def test_k_one_needs_only_two_samples() -> None:
    check_objective(MaxAtK(k=1, baseline="none", center=True), 2)
    check_objective(Mean(), 2)


ONE_K = {"k": 4}
SOME = {"weights": {1: 0.5, 4: 0.5}}
HARMONIC = {"weights": "harmonic", "order": 4}


@pytest.mark.parametrize(
    ("before", "added", "after"),
    [
        (ONE_K, {"k": 2}, {"k": 2}),
        (SOME, {"k": 2}, {"k": 2}),
        (HARMONIC, {"k": 2}, {"k": 2}),
        (ONE_K, {"weights": {2: 1.0}}, {"weights": {2: 1.0}}),
        (SOME, {"weights": {2: 1.0}}, {"weights": {2: 1.0}}),
        (HARMONIC, {"weights": {2: 1.0}}, {"weights": {2: 1.0}}),
        (ONE_K, {"weights": "harmonic", "order": 3}, {"weights": "harmonic", "order": 3}),
        (SOME, {"weights": "harmonic", "order": 3}, {"weights": "harmonic", "order": 3}),
        (HARMONIC, {"weights": "harmonic"}, HARMONIC),
        (HARMONIC, {"order": 3}, {"weights": "harmonic", "order": 3}),
        (SOME, {}, SOME),
    ],
    ids=str,
)
def test_a_new_number_of_tries_replaces_the_old_one(
    before: dict[str, Any], added: dict[str, Any], after: dict[str, Any]
) -> None:
    others = {"kind": "max_at_k", "center": True}
    changed = with_tries({**others, **before}, added)
    assert changed == {**others, **after}
    parse_objective(changed)
