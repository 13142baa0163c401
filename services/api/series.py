"""Metrics of runs as columns in memory, fed from the tail of their streams, so that charts need no JSON parsing.

A run's table has float64 columns, with NaN for missing values. ``{"lag_histogram": {"0": 5}}`` becomes the column
``lag_histogram.0``. A row whose step is not greater than the last one comes from a resumed run and replaces that step
and all later ones.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from services.api.shared import SharedRead
from services.store.redis import Store
from volley.views import Series

COLUMNS = 1000  # most columns of one run; later ones are dropped
PAGE = 500  # rows parsed before other tasks get a turn
FRESH_SECONDS = 0.2  # a table is not updated again within this time
_START_ROWS = 256


class Table:
    """The rows of one run's metrics, with strictly increasing steps."""

    def __init__(self) -> None:
        self._rows = 0
        self._capacity = _START_ROWS
        self._steps = np.zeros(self._capacity, np.int64)
        self._columns: dict[str, NDArray[np.float64]] = {}

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        return self._steps.nbytes * (1 + len(self._columns))

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, dropping rows with its step or a later one."""
        step = int(row["step"])
        if self._rows and step <= self._steps[self._rows - 1]:
            self._forget_from(step)
        if self._rows == self._capacity:
            self._grow()
        self._steps[self._rows] = step
        for name, value in _numbers(row):
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= COLUMNS:
                    continue
                column = self._columns[name] = np.full(self._capacity, np.nan)
            column[self._rows] = value
        self._rows += 1

    def answer(
        self, names: Sequence[str] | None, first: int | None, last: int | None, points: int
    ) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]], int]:
        """Reduce the columns ``names`` (None for all) over steps ``first`` to ``last``, inclusive, to ``points``.

        Returns:
            The last step of each bucket, int64 [points]; the mean of each column over each bucket, NaN without a value;
            and the number of rows in the range. Buckets have equal width in steps and are aligned to its multiples, so
            a bucket does not change when later rows are added.
        """
        steps = self._steps[: self._rows]
        begin = 0 if first is None else int(np.searchsorted(steps, first, "left"))
        end = self._rows if last is None else int(np.searchsorted(steps, last, "right"))
        end = max(begin, end)
        chosen = [name for name in (self.names if names is None else names) if name in self._columns]
        steps = steps[begin:end]
        columns = {name: self._columns[name][begin:end] for name in chosen}
        if len(steps) <= points:
            return steps, columns, len(steps)
        starts = _bucket_starts(steps, points)
        ends = np.append(starts[1:], len(steps)) - 1
        return steps[ends], {name: _means(column, starts) for name, column in columns.items()}, len(steps)

    def _forget_from(self, step: int) -> None:
        self._rows = int(np.searchsorted(self._steps[: self._rows], step, "left"))
        for column in self._columns.values():
            column[self._rows :] = np.nan

    def _grow(self) -> None:
        more = self._capacity
        self._steps = np.concatenate([self._steps, np.zeros(more, np.int64)])
        self._columns = {
            name: np.concatenate([column, np.full(more, np.nan)]) for name, column in self._columns.items()
        }
        self._capacity += more


class SeriesCache:
    """The tables of the most recently requested runs.

    Args:
        most_bytes: size limit of all tables together. The least recently used ones are dropped, except the last.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store, self._most = store, most_bytes
        self._runs: OrderedDict[str, _Followed] = OrderedDict()

    async def answer(
        self, run_id: str, names: Sequence[str] | None, first: int | None, last: int | None, points: int
    ) -> Series:
        """See `Table.answer`. Raises `HostError` while Redis is away."""
        table = await self.table(run_id)
        steps, columns, total = table.answer(names, first, last, points)
        return Series.model_construct(
            steps=steps.tolist(),
            series={name: _with_nulls(column) for name, column in columns.items()},
            total=total,
            names=table.names,
        )

    async def table(self, run_id: str) -> Table:
        """Return the run's table, brought up to date."""
        followed = self._runs.setdefault(run_id, _Followed(self._store, run_id))
        self._runs.move_to_end(run_id)
        table = await followed.table.get()
        while len(self._runs) > 1 and sum(map(_Followed.nbytes, self._runs.values())) > self._most:
            self._runs.popitem(last=False)
        return table

    def forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def __len__(self) -> int:
        return len(self._runs)


class _Followed:
    """A run's table, brought up to date by reading on from a position in the stream."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._rows = Table()
        self._after: str | None = None
        self.table = SharedRead(self._catch_up, FRESH_SECONDS)

    def nbytes(self) -> int:
        return self._rows.nbytes

    async def _catch_up(self) -> Table:
        while True:
            entries = await self._store.entries(self._run_id, "metrics", after=self._after, count=PAGE)
            for name, row in entries:
                self._rows.add(row)
                self._after = name
            if len(entries) < PAGE:
                return self._rows
            await asyncio.sleep(0)


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name == "step":
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", float(each)) for key, each in value.items() if _is_number(each))
        elif _is_number(value):
            yield name, float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bucket_starts(steps: NDArray[np.int64], points: int) -> NDArray[np.intp]:
    """Return the indices at which buckets begin, at most ``points`` of them."""
    width = max(1, -(-int(steps[-1] - steps[0] + 1) // points))
    while True:
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        if len(starts) <= points:
            return starts
        width += 1  # a range that is not aligned spans one bucket more than it fills


def _means(column: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    finite = np.isfinite(column)
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
    means: NDArray[np.float64] = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


def _with_nulls(column: NDArray[np.float64]) -> list[float | None]:
    values: list[float | None] = column.tolist()
    for i in np.flatnonzero(~np.isfinite(column)).tolist():
        values[i] = None
    return values
