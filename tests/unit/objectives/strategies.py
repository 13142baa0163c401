"""Hypothesis strategies: small groups with ties, negative rewards, and weights on both sides of 1."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import hypothesis
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from tests.unit.objectives import oracle

rationals = st.one_of(
    st.integers(-3, 3).map(Fraction),  # ties
    st.builds(Fraction, st.integers(-1000, 1000), st.sampled_from([1, 7, 64])),
)
weights = st.builds(Fraction, st.integers(1, 40), st.integers(1, 40))


def given(**arguments: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """hypothesis.given with the same examples every time and no deadline, because machines may be busy."""
    same_examples = settings(derandomize=True, deadline=None, max_examples=60, database=None)
    return lambda test: same_examples(hypothesis.given(**arguments)(test))


class Case(NamedTuple):
    """A group of n rewards and weights, and k."""

    g: list[Fraction]
    w: list[Fraction]
    k: int


class VoteCase(NamedTuple):
    """A group of n (answer, reward) votes and weights, and k."""

    y: list[tuple[int, Fraction]]
    w: list[Fraction]
    k: int


@st.composite
def cases(draw: st.DrawFn, min_k: int = 1, spare: int = 0, max_n: int = 7) -> Case:
    """Cases with n from 2 to max_n and min_k <= k <= n - spare."""
    n = draw(st.integers(max(2, min_k + spare), max_n))
    g = draw(st.lists(rationals, min_size=n, max_size=n))
    w = draw(st.lists(weights, min_size=n, max_size=n))
    return Case(g, w, draw(st.integers(min_k, n - spare)))


@st.composite
def vote_cases(draw: st.DrawFn, min_k: int = 1, max_n: int = 7) -> VoteCase:
    """Votes for up to five answers; several answers may have the same reward."""
    n = draw(st.integers(max(2, min_k), max_n))
    rewards = draw(st.lists(rationals, min_size=5, max_size=5))
    answers = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    w = draw(st.lists(weights, min_size=n, max_size=n))
    return VoteCase([(answer, rewards[answer]) for answer in answers], w, draw(st.integers(min_k, n)))


def floats(values: list[Fraction]) -> NDArray[np.float64]:
    """The Fractions as float64."""
    return np.array([float(value) for value in values])


def logs(values: list[Fraction]) -> NDArray[np.float64]:
    """The logarithms of the weights."""
    return np.log(floats(values))


def split_votes(y: list[tuple[int, Fraction]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Answers and rewards as the functions under test expect them."""
    return np.array([answer for answer, _ in y]), floats([reward for _, reward in y])


def size_of(g: list[Fraction], w: list[Fraction] | None = None, k: int = 1) -> float:
    """The scale of the terms in an estimate: the largest reward times the mean weight of a subset."""
    largest = float(max([oracle.ONE, *(abs(reward) for reward in g)]))
    mean_weights = [float(oracle.metric(lambda _: oracle.ONE, w, j, w)) for j in (k - 1, k)] if w else []
    return largest * max([1.0, *mean_weights])


def close(actual: ArrayLike, exact: list[Fraction], size: float = 1.0) -> None:
    """Assert agreement to 1e-11, relative to the value or, for values that cancel to about zero, to ``size``.

    Raises:
        AssertionError: they differ.
    """
    np.testing.assert_allclose(np.asarray(actual), floats(exact), rtol=1e-11, atol=1e-12 * size)
