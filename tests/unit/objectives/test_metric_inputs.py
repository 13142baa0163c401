"""What the metrics refuse: one bad entry among good ones is enough."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from volley.objectives import best_of_k, maj_at_k, max_at_k, pass_at_k

GOOD = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
ANSWERS = np.array([[1, 2, 1], [3, 3, 1]])
METRICS: dict[str, Callable[..., Any]] = {
    "max_at_k": max_at_k,
    "maj_at_k": lambda rewards, k: maj_at_k(ANSWERS, rewards, k),
    "best_of_k": lambda rewards, k: best_of_k(rewards, GOOD, k),
}


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        ([4, 4], [1, -1], [2, 2], "0 <= c <= n"),
        ([4, 4], [1, 5], [2, 2], "0 <= c <= n"),
        ([4, 4], [1, 1], [2, 0], "1 <= k <= n"),
        ([4, 4], [1, 1], [2, 5], "1 <= k <= n"),
    ],
)
def test_one_impossible_count_is_refused(n: list[int], c: list[int], k: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("place", range(3))
def test_one_count_that_is_no_integer_is_refused(place: int) -> None:
    counts: list[Any] = [4, 1, 2]
    counts[place] = float(counts[place])
    with pytest.raises(TypeError, match="integer counts"):
        pass_at_k(*counts)


def test_scalars_give_a_float_and_arrays_an_array() -> None:
    assert type(pass_at_k(4, 1, 2)) is float
    assert pass_at_k(4, [1], 2).shape == (1,)  # type: ignore[union-attr]
    assert pass_at_k(np.zeros(0, int), 0, 1).shape == (0,)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("k", [-1, 0, 4])
def test_a_k_that_no_group_has_is_refused(name: str, k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} needs 1 <= k <= n"):
        METRICS[name](GOOD, k)
    for k in (1, 3):
        assert METRICS[name](GOOD, k).shape == (2,)


@pytest.mark.parametrize("name", METRICS)
def test_one_reward_that_is_not_finite_is_refused(name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        rewards = GOOD.copy()
        rewards[1, 2] = bad
        with pytest.raises(ValueError, match="finite"):
            METRICS[name](rewards, 2)


def test_weights_that_overflow_in_one_group_are_refused() -> None:
    log_weights = np.zeros(GOOD.shape)
    log_weights[1] = 400.0
    assert max_at_k(GOOD, 1, log_weights=log_weights).shape == (2,)
    with pytest.raises(ValueError, match="overflow float64"):
        max_at_k(GOOD, 2, log_weights=log_weights)


@pytest.mark.parametrize("name", METRICS)
def test_no_groups_give_no_estimates(name: str) -> None:
    empty = np.zeros((0, 3))
    answers = np.zeros((0, 3), int)
    made = {
        "max_at_k": lambda: max_at_k(empty, 2),
        "maj_at_k": lambda: maj_at_k(answers, empty, 2),
        "best_of_k": lambda: best_of_k(empty, empty, 2),
    }[name]()
    assert made.shape == (0,)


def test_best_of_k_needs_ranks() -> None:
    with pytest.raises((ValueError, TypeError), match="rank"):
        best_of_k(GOOD, None, 2)  # type: ignore[arg-type]
