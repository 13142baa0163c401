"""The bootstrap interval: compared with the normal interval, its coverage, and edge cases."""

import numpy as np
import pytest

from volley.objectives import bootstrap_interval, max_at_k


def test_agrees_with_the_normal_interval_on_many_prompts() -> None:
    values = np.random.default_rng(0).normal(2.0, 3.0, 4000)
    low, high = bootstrap_interval(values, level=0.9)
    half = 1.645 * values.std() / np.sqrt(len(values))
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.01)


def test_coverage_is_near_the_confidence_level() -> None:
    """In 300 experiments with 60 prompts, a 90% interval contains the true max@4 in 85 to 95% of them."""
    rng = np.random.default_rng(1)
    solve_rate = 0.3
    truth = 1 - (1 - solve_rate) ** 4
    hits = 0
    for seed in range(300):
        values = max_at_k((rng.random((60, 8)) < solve_rate).astype(float), 4)
        low, high = bootstrap_interval(values, level=0.9, seed=seed, resamples=400)
        hits += low <= truth <= high
    assert 0.85 <= hits / 300 <= 0.95


def test_is_reproducible_and_moves_with_the_seed() -> None:
    values = np.random.default_rng(2).random(30)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_the_defaults_are_those_of_the_signature() -> None:
    values = np.random.default_rng(3).random(30)
    assert bootstrap_interval(values) == bootstrap_interval(values, level=0.95, seed=0, resamples=4000)
    assert bootstrap_interval(values) != bootstrap_interval(values, resamples=4001)


def test_one_prompt_has_an_interval_of_zero_width() -> None:
    assert bootstrap_interval([0.25]) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("values", "level", "message"),
    [
        ([], 0.95, "P >= 1"),
        ([[0.1, 0.2]], 0.95, "one value per prompt"),
        ([0.1, float("nan")], 0.95, "not finite"),
        ([0.1], 95, "write level=0.95"),
        ([0.1], 0.0, "write level=0.95"),
        ([0.1], 1.0, "write level=0.95"),
    ],
)
def test_invalid_arguments_are_rejected(values: list[float], level: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values, level=level)
