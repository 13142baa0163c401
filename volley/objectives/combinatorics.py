"""Ratios of binomial coefficients, exact to the last bit."""

from collections.abc import Iterator
from functools import lru_cache
from math import comb
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]


@lru_cache(maxsize=512)
def binomial_ratios(start: int, stop: int, j: int, total_n: int, total_k: int) -> FloatArray:
    """`C(m, j) / C(total_n, total_k)` for m = start .. stop - 1; zero where m < 0, j < 0 or j > m.

    Each binomial comes from the one before it, exactly, and division of Python integers rounds correctly, so no size
    overflows and nothing is lost to cancellation. The array is read-only because it is cached.
    """
    ratios = np.zeros(stop - start)
    total, first = comb(total_n, total_k), max(start, j)
    if j >= 0:
        ratios[first - start :] = [binomial / total for binomial in _binomials(first, stop, j)]
    ratios.flags.writeable = False
    return ratios


def _binomials(first: int, stop: int, j: int) -> Iterator[int]:
    """`C(m, j)` for m = first .. stop - 1, by `C(m + 1, j) = C(m, j) (m + 1) / (m + 1 - j)`; needs 0 <= j <= first."""
    binomial = comb(first, j)
    for m in range(first, stop):
        yield binomial
        binomial = binomial * (m + 1) // (m + 1 - j)


def log_binomials(n: int, k: IntArray) -> FloatArray:
    """`log C(n, k)` element by element; -inf where k < 0 or k > n."""
    inside = (k >= 0) & (k <= n)
    clipped = np.clip(k, 0, n)
    table = _log_factorials(n)
    return np.where(inside, table[n] - table[clipped] - table[n - clipped], -np.inf)


@lru_cache(maxsize=512)
def _log_factorials(n: int) -> FloatArray:
    """`log j!` for j = 0 .. n."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
