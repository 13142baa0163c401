"""Means over seeds with 95% intervals, and curves of several runs on one axis.

Shapes: S seeds, T steps, X points of an axis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.recording.plots import smooth
from services.sweeps.spec import Axis
from volley.client.results import Metrics

Floats = NDArray[np.float64]
SHARE = 0.95
POINTS = 200  # of a curve
SMOOTHED = 20  # a curve is a moving mean over this part of its steps: 1/20
SMOOTHED_DIVERGENCE = 5  # the divergence is noisier, and has to rise


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds, and its 95% interval by Student's t; without bounds if there is only one seed.

    Attributes:
        values: one for each seed.
    """

    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean, half = (float(each[0]) for each in band(np.asarray(values, float)[:, None]))
        exact = tuple(float(value) for value in values)
        return cls(exact, mean, None, None) if math.isnan(half) else cls(exact, mean, mean - half, mean + half)


def band(values_SX: Floats) -> tuple[Floats, Floats]:
    """Means over seeds [X], and half the widths of their 95% intervals [X]; those are nan with one seed."""
    seeds = len(values_SX)
    mean_X = values_SX.mean(axis=0)
    if seeds < 2:
        return mean_X, np.full_like(mean_X, np.nan)
    return mean_X, student_t(seeds - 1) * values_SX.std(axis=0, ddof=1) / math.sqrt(seeds)


@cache
def student_t(freedom: int, share: float = SHARE) -> float:
    """The t that bounds ``share`` of Student's distribution with ``freedom`` degrees of freedom, on both sides.

    Bisection on the distribution function for whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4, with
    theta = atan(t / sqrt(freedom)).
    """
    low, high = 0.0, math.pi / 2
    while (theta := (low + high) / 2) not in (low, high):
        low, high = (theta, high) if _within(theta, freedom) < share else (low, theta)
    return math.sqrt(freedom) * math.tan(theta)


def _within(theta: float, freedom: int) -> float:
    """The probability of -t to t."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def metrics_of(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    """The numbers in the rows of a run folder as arrays [T], nan where a row lacks one."""
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    columns = {name: np.array([row.get(name, np.nan) for row in rows], float) for name in sorted(names)}
    return Metrics(np.array([row["step"] for row in rows], np.int64), columns)


def axis_of(metrics: Metrics, axis: Axis, n: int) -> Floats:
    """What each step of a run is drawn at, [T]: after the step, except that the divergence is the step's own.

    Args:
        n: samples per prompt; the groups that others replaced had as many.
    """
    steps = len(metrics.steps)
    if axis == "samples":
        made = metrics["samples_per_second"] * metrics["seconds_step"]
        replaced = np.nan_to_num(metrics.columns.get("replaced_groups", np.zeros(steps)))
        return np.asarray(np.cumsum(np.round(made + n * replaced)), np.float64)
    if axis == "divergence":
        smoothed = smooth(metrics["kl_k1"].tolist(), steps // SMOOTHED_DIVERGENCE)
        return np.asarray(np.maximum.accumulate(smoothed), np.float64)
    return metrics.steps.astype(np.float64) + 1


def on_one_axis(xs: Sequence[Floats], ys: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Curves of several seeds where all of them have values: the axis [X], and the values [S, X].

    Along an axis that stays where it is for some steps, the value is that of the first of them.
    """
    low, high = max(x[0] for x in xs), min(x[-1] for x in xs)
    x_X = np.linspace(low, max(low, high), POINTS)
    rows = []
    for x, y in zip(xs, ys, strict=True):
        first = np.concatenate([[True], np.diff(x) > 0])
        rows.append(np.interp(x_X, x[first], y[first]))
    return x_X, np.stack(rows)
