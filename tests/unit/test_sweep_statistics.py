"""Intervals and curves over seeds, against closed forms, published values and slow loops."""

import math
import statistics

import numpy as np
import pytest

from services.sweeps.statistics import Interval, axis_of, band, metrics_of, on_one_axis, student_t

# Two-sided 95% points by degrees of freedom, from scipy.stats.t.ppf(0.975, freedom).
POINTS = {
    1: 12.706204736174694,
    2: 4.302652729749462,
    3: 3.182446305284263,
    4: 2.7764451051977987,
    5: 2.570581835636314,
    10: 2.2281388519649385,
    30: 2.0422724563012373,
    120: 1.979930405052777,
}


@pytest.mark.parametrize(("freedom", "expected"), POINTS.items())
def test_t_agrees_with_scipy(freedom: int, expected: float) -> None:
    assert student_t(freedom) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.95, 0.999])
def test_t_is_exact_for_one_and_two_degrees_of_freedom(share: float) -> None:
    assert student_t(1, share) == pytest.approx(math.tan(math.pi * share / 2), rel=1e-9)
    assert student_t(2, share) == pytest.approx(share * math.sqrt(2 / (1 - share * share)), rel=1e-9)


def test_t_approaches_the_normal_distribution() -> None:
    assert student_t(100_001) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), rel=1e-4)


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    """Of three draws each, 20,000 times; a normal interval would cover 86%."""
    draws_SX = np.random.default_rng(0).normal(5, 2, (3, 20_000))
    mean_X, half_X = band(draws_SX)
    assert (np.abs(mean_X - 5) <= half_X).mean() == pytest.approx(0.95, abs=0.006)


def test_an_interval_of_two_seeds_and_of_one() -> None:
    two = Interval.of([0.2, 0.4])
    half = 12.7062047 * math.sqrt(2) * 0.1 / math.sqrt(2)
    assert (two.mean, two.low, two.high) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    assert Interval.of([0.2]) == Interval((0.2,), 0.2, None, None)


def rows(steps: int, **columns: float) -> list[dict[str, float]]:
    return [{"step": step, "kl_k1": step / steps, **columns} for step in range(steps)]


def test_axes_are_steps_samples_made_and_a_divergence_that_only_rises() -> None:
    metrics = metrics_of(rows(4, samples_per_second=32.0, seconds_step=0.5, replaced_groups=2))
    assert axis_of(metrics, "steps", 8).tolist() == [1, 2, 3, 4]
    assert axis_of(metrics, "samples", 8).tolist() == [32, 64, 96, 128]
    falling = metrics_of([{"step": 0, "kl_k1": 0.3}, {"step": 1, "kl_k1": 0.1}, {"step": 2, "kl_k1": 0.4}])
    assert axis_of(falling, "divergence", 8).tolist() == pytest.approx([0.3, 0.3, 0.4])


def test_curves_meet_where_every_seed_has_values() -> None:
    x_X, y_SX = on_one_axis(
        [np.array([0.0, 1.0, 4.0]), np.array([1.0, 1.0, 3.0])], [np.array([0.0, 1.0, 4.0]), np.array([5.0, 9.0, 7.0])]
    )
    assert (x_X[0], x_X[-1]) == (1.0, 3.0)
    np.testing.assert_allclose(y_SX[0], x_X)
    np.testing.assert_allclose(y_SX[1], 4 + x_X, err_msg="the axis stood still: the first value counts")


def test_rows_may_lack_numbers() -> None:
    metrics = metrics_of([{"step": 0, "a": 1.0, "h": {"0": 2}}, {"step": 1, "b": 2}])
    np.testing.assert_array_equal(metrics["a"], [1.0, np.nan])
    assert sorted(metrics) == ["a", "b", "step"]
    assert len(metrics_of([]).steps) == 0
