"""How many tries count: one k, or a weight for each of several k.

An objective over tries is the sum of f@k over some k, each with its weight: `terms`. Estimates are linear in it, so
the estimate of a sum is the sum of the estimates.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field

from volley.objectives.combinatorics import FloatArray

Terms: TypeAlias = tuple[tuple[int, float], ...]  # (k, weight), by rising k; weights above 0

MOST_WEIGHT = sys.float_info.max
ADVICE = "write a mapping from k to its weight, such as weights: {1: 0.5, 8: 0.5}; an objective also takes harmonic"


def _read(value: object) -> object:
    """Check weights as they were written. Raises ValueError with advice."""
    return value if value is None or value == "harmonic" else _read_mapping(value)


def _read_mapping(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a mapping of weights: {ADVICE}")
    if not value:
        raise ValueError(f"weights is empty, so no number of tries would count: {ADVICE}")
    weights: dict[int, float] = {}
    for key, weight in value.items():
        k = _read_k(key)
        if k in weights:
            raise ValueError(f"k={k} has two weights: write their sum")
        if isinstance(weight, bool) or not isinstance(weight, Real) or weight < 0 or not weight <= MOST_WEIGHT:
            raise ValueError(f"the weight {weight!r} of k={k} is not a number of 0 or more: correct or remove it")
        weights[k] = float(weight)
    if not any(weights.values()):
        raise ValueError(f"all weights are 0, so no number of tries would count: {ADVICE}")
    return dict(sorted(weights.items()))


def _read_k(key: object) -> int:
    """A key as an integer; JSON writes it as a string."""
    number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise ValueError(f"{key!r} is not a number of tries: the keys of weights are integers of 1 or more")
    return int(number)


_WeightOfK: TypeAlias = dict[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0)]]
Weights: TypeAlias = Annotated[_WeightOfK | Literal["harmonic"], BeforeValidator(_read)]
WeightOfK: TypeAlias = Annotated[_WeightOfK, BeforeValidator(_read_mapping)]


def check_tries(k: int | None, weights: Mapping[int, float] | str | None, order: int | None) -> None:
    """Refuse anything but one of: k, weights, harmonic weights with their order.

    Raises:
        ValueError: with what to write instead.
    """
    if k is None and weights is None:
        raise ValueError("how many tries count is missing: write k: 8, or weights: {1: 0.5, 8: 0.5}")
    if k is not None and weights is not None:
        raise ValueError(f"k and weights both say how many tries count: remove k, or write k: {k} without weights")
    if weights == "harmonic" and order is None:
        raise ValueError("weights: harmonic is 1/k for k = 1 .. order: write order: 16, or another number up to n")
    if weights != "harmonic" and order is not None:
        raise ValueError("order is the largest k of weights: harmonic: remove order, or write weights: harmonic")


def terms_of(k: int | None, weights: Mapping[int, float] | str | None, order: int | None) -> Terms:
    """The terms that valid fields stand for."""
    if isinstance(weights, Mapping):
        return tuple((each, weight) for each, weight in sorted(weights.items()) if weight > 0)
    if weights is not None and order is not None:
        return tuple((each, 1 / each) for each in range(1, order + 1))
    return () if k is None else ((k, 1.0),)


def with_tries(before: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an objective with some added: a new k replaces weights, and new weights replace k."""
    replaced: set[str] = set()
    if added.get("k") is not None:
        replaced = {"weights", "order"}
    elif added.get("weights") is not None:
        replaced = {"k"} if added["weights"] == "harmonic" else {"k", "order"}
    return {**{key: value for key, value in before.items() if key not in replaced}, **added}


def between(before: Terms, after: Terms, share: float) -> dict[int, float]:
    """Weights on the straight line between two sets of terms: `before` at share 0, `after` at share 1."""
    old, new = dict(before), dict(after)
    return {k: (1 - share) * old.get(k, 0.0) + share * new.get(k, 0.0) for k in sorted(old | new)}


def mean_over(terms: Terms, value: Callable[[int], FloatArray]) -> FloatArray:
    """`sum_k w_k value(k) / sum_k w_k`: what to expect of tries that are spread as the weights are."""
    total = sum(weight for _, weight in terms)
    return np.sum([weight / total * value(k) for k, weight in terms], axis=0)  # type: ignore[no-any-return]


def up_to(terms: Terms, largest: int) -> Terms:
    """The terms with every k above `largest` counted as `largest`, for a group too small for them."""
    weights: dict[int, float] = defaultdict(float)
    for k, weight in terms:
        weights[min(k, largest)] += weight
    return tuple(weights.items())
