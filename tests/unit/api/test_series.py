"""Columns of metrics, compared with the plain rows they were made from."""

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.api.series import COLUMNS, Table

VALUES = st.none() | st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 3, True, "text"])
ROWS = st.lists(st.tuples(st.integers(0, 400), st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES)), max_size=60)


def as_rows(drawn: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{"step": step, **values} for step, values in drawn]


def valid_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The valid rows: a row whose step does not rise replaces all rows from that step on."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        kept = [each for each in kept if each["step"] < row["step"]] + [row]
    return kept


def number(value: Any) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ok else math.nan


def mean(values: list[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return math.fsum(there) / len(there) if there else math.nan


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for row in rows:
        table.add(row)
    return table


@settings(deadline=None)
@given(ROWS)
def test_all_rows_are_returned_as_columns(drawn: list[tuple[int, dict[str, Any]]]) -> None:
    rows = as_rows(drawn)
    kept = valid_rows(rows)
    steps, columns, total = table_of(rows).answer(None, None, None, 10_000)
    assert steps.tolist() == [row["step"] for row in kept]
    assert total == len(kept)
    for name, column in columns.items():
        found = np.where(np.isfinite(column), column, np.nan)
        np.testing.assert_array_equal(found, np.array([number(row.get(name)) for row in kept], np.float64))


@settings(deadline=None)
@given(ROWS, st.integers(1, 30), st.none() | st.integers(0, 450), st.none() | st.integers(0, 450))
def test_buckets_are_means_of_their_rows(
    drawn: list[tuple[int, dict[str, Any]]], points: int, first: int | None, last: int | None
) -> None:
    rows = as_rows(drawn)
    wanted = [
        row
        for row in valid_rows(rows)
        if (first is None or row["step"] >= first) and (last is None or row["step"] <= last)
    ]
    steps, columns, total = table_of(rows).answer(["a"], first, last, points)
    assert total == len(wanted)
    if total <= points:
        assert steps.tolist() == [row["step"] for row in wanted]
        return
    assert 1 <= len(steps) <= points
    assert steps[-1] == wanted[-1]["step"]
    buckets = np.split(np.arange(total), np.searchsorted([row["step"] for row in wanted], steps[:-1], "right"))
    expected = [mean([number(wanted[i].get("a")) for i in bucket]) for bucket in buckets]
    if "a" in columns:
        np.testing.assert_allclose(columns["a"], expected, rtol=1e-9, atol=1e-6)
    widths = {int(step) for step in steps}
    assert len(widths) == len(steps), "steps rise"


def test_buckets_do_not_change_as_rows_are_added() -> None:
    table = table_of([{"step": step, "a": float(step * step)} for step in range(9_100)])
    before, first, _ = table.answer(["a"], None, None, 1000)
    for step in range(9_100, 9_900):
        table.add({"step": step, "a": 0.0})
    after, second, _ = table.answer(["a"], None, None, 1000)
    np.testing.assert_array_equal(before[:-1], after[: len(before) - 1])
    np.testing.assert_array_equal(first["a"][:-1], second["a"][: len(before) - 1])


def test_sparse_steps_fit_in_the_requested_points() -> None:
    table = table_of([{"step": step**2, "a": 1.0} for step in range(1000)])
    steps, columns, total = table.answer(None, None, None, 100)
    assert (total, len(columns["a"])) == (1000, len(steps))
    assert len(steps) <= 100


def test_the_number_of_columns_is_bounded() -> None:
    table = table_of([{"step": 0, **{f"m{i}": 1.0 for i in range(COLUMNS + 50)}}])
    assert len(table.names) == COLUMNS
