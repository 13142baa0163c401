"""Binomials against `math.comb` and rational arithmetic, beyond their ranges too."""

from fractions import Fraction
from math import comb, inf, log

import numpy as np
import pytest

from volley.objectives.combinatorics import binomial_ratios, log_binomials


@pytest.mark.parametrize("j", [-2, -1, 0, 1, 3, 9])
@pytest.mark.parametrize(("start", "stop"), [(-3, 8), (0, 5), (2, 2), (4, 12)])
def test_ratios_are_correctly_rounded_and_zero_where_there_is_no_binomial(start: int, stop: int, j: int) -> None:
    ratios = binomial_ratios(start, stop, j, 40, 17)
    exact = [Fraction(comb(m, j) if 0 <= j <= m else 0, comb(40, 17)) for m in range(start, stop)]
    assert ratios.tolist() == [float(each) for each in exact]


def test_cached_ratios_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        binomial_ratios(0, 4, 1, 9, 3)[0] = 1.0


def test_log_binomials_are_minus_infinity_outside() -> None:
    k = np.array([[-7, -1, 0, 1], [5, 9, 10, 33]])
    wanted = [[-inf, -inf, log(comb(9, 0)), log(comb(9, 1))], [log(comb(9, 5)), log(comb(9, 9)), -inf, -inf]]
    np.testing.assert_allclose(log_binomials(9, k), wanted, rtol=1e-12, atol=1e-12)
