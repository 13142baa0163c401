"""How many tries count: terms of sums over k, and what is said of them."""

import numpy as np

from volley.objectives.tries import between, mean_over, up_to


def test_the_mean_over_tries_is_weighted() -> None:
    """Two tries of weight 0.5 and 1.5: their values count 1:3, whatever the weights add up to."""
    found = mean_over(((1, 0.5), (4, 1.5)), lambda k: np.array([float(k), 1.0]))
    np.testing.assert_allclose(found, [(0.25 * 1) + (0.75 * 4), 1.0], rtol=1e-15)


def test_tries_beyond_a_group_count_as_all_of_it() -> None:
    assert up_to(((1, 0.5), (4, 0.25), (8, 2.0), (16, 1.0)), 5) == ((1, 0.5), (4, 0.25), (5, 3.0))
    assert up_to(((4, 1.0),), 4) == ((4, 1.0),)


def test_weights_between_two_objectives() -> None:
    assert between(((1, 1.0), (4, 0.5)), ((4, 1.0), (8, 2.0)), 0.25) == {1: 0.75, 4: 0.625, 8: 0.5}
