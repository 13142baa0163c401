"""Groups without anything to tell apart have advantages of exactly zero: rounding noise would count as a signal."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.unit.objectives.strategies import given
from volley.objectives import advantages
from volley.objectives.maximum import coefficients

OBJECTIVES: list[dict[str, Any]] = [
    {"kind": "mean"},
    {"kind": "mean", "normalize": "std"},
    {"kind": "max_at_k", "k": 2},
    {"kind": "max_at_k", "k": 1, "baseline": "loo_minus_one"},
    {"kind": "max_at_k", "k": 2, "baseline": "subset_loo", "center": True},
    {"kind": "max_at_k", "k": 2, "center": True, "normalize": "std"},
    {"kind": "max_at_k", "k": 2, "companion_weights": "exact"},
    {"kind": "max_at_k", "weights": {1: 0.3, 2: 0.7}, "companion_weights": "self_normalised"},
    {"kind": "maj_at_k", "k": 2},
    {"kind": "maj_at_k", "k": 1},
    {"kind": "softmax", "beta": 2.0},
    {"kind": "maxrl"},
    {"kind": "risk_sensitive", "beta": 0.7},
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@given(reward=st.floats(0, 1e6), n=st.integers(3, 40), answers=st.integers(1, 3))
def test_equal_rewards_give_exact_zeros(objective: dict[str, Any], reward: float, n: int, answers: int) -> None:
    weights = np.linspace(-1.0, 1.0, n) if "companion_weights" in objective else None
    out_n = advantages([reward] * n, objective, answers=np.arange(n) % answers, log_weights=weights)
    assert (out_n == 0).all(), out_n


@given(reward=st.floats(0, 1e6), tied=st.integers(2, 12), below=st.integers(0, 3), k=st.integers(2, 3))
def test_equal_rewards_of_a_tied_rank_have_equal_advantages(reward: float, tied: int, below: int, k: int) -> None:
    """Nothing tells them apart; of the lowest rank, they earn exactly nothing."""
    rewards, ranks = [0.3] * below + [reward] * tied + [0.0], [0.0] * below + [1.0] * tied + [2.0]
    out_n = advantages(rewards, {"kind": "best_of_k", "k": k}, ranks=ranks)
    assert len({*out_n[below : below + tied]}) == 1
    if below == 0:
        assert (out_n[:tied] == 0).all(), out_n


@pytest.mark.parametrize("kind", ["max_at_k", "maj_at_k", "best_of_k"])
@pytest.mark.parametrize("log_weight", [-700.0, 400.0, 700.0])
def test_so_do_those_whose_weights_have_no_finite_product(kind: str, log_weight: float) -> None:
    objective = {"kind": kind, "k": 3, "companion_weights": "exact"}
    voters = np.arange(6) % 3
    out_n = advantages([0.5] * 6, objective, answers=voters, ranks=voters, log_weights=np.full(6, log_weight))
    assert (out_n == 0).all(), out_n


def test_cached_coefficients_cannot_be_overwritten() -> None:
    for each in coefficients(8, ((4, 1.0),), "loo")[1:]:
        with pytest.raises(ValueError, match="read-only"):
            each[0] = 1.0
