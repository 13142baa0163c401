"""Metrics of runs as columns in memory, fed from the tail of their streams: a chart is answered without parsing JSON.

A run's table holds float64 columns; NaN is what a row does not have. ``{"lag_histogram": {"0": 5}}`` becomes the column
``lag_histogram.0``. A row whose step is not higher than the last one's is a resumed run's: it replaces what follows.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.api.schemas import Series
from services.store import Store

COLUMNS = 1000  # of one run; a job that makes more names than these has its later ones left out
PAGE = 500  # rows parsed before others get their turn
FRESH_SECONDS = 0.2  # a table just brought up to date is good for so long
_START_ROWS = 256


class Table:
    """The rows of one run's metrics, steps strictly rising."""

    def __init__(self) -> None:
        self._rows = 0
        self._room = _START_ROWS
        self._steps = np.zeros(self._room, np.int64)
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
        """Append a row; those with its step or a later one are forgotten."""
        step = int(row["step"])
        if self._rows and step <= self._steps[self._rows - 1]:
            self._forget_from(step)
        if self._rows == self._room:
            self._grow()
        self._steps[self._rows] = step
        for name, value in _numbers(row):
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= COLUMNS:
                    continue
                column = self._columns[name] = np.full(self._room, np.nan)
            column[self._rows] = value
        self._rows += 1

    def answer(
        self, names: Sequence[str] | None, first: int | None, last: int | None, points: int
    ) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]], int]:
        """At most ``points`` points of the columns ``names`` (None: all) over steps ``first`` to ``last``, both in.

        Returns:
            Last step of each bucket, int64 [points]; mean of each column over it, NaN where it has no value; and the
            rows there were. Buckets are ranges of steps of one width, aligned to its multiples: a bucket stays what
            it is while rows are added behind it.
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
        more = self._room
        self._steps = np.concatenate([self._steps, np.zeros(more, np.int64)])
        self._columns = {
            name: np.concatenate([column, np.full(more, np.nan)]) for name, column in self._columns.items()
        }
        self._room += more


class SeriesCache:
    """The tables of the runs last asked for.

    Args:
        most_bytes: of all tables; the one least recently asked for goes first. The last one always stays.
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
        """The run's table, with all that Redis holds by now."""
        followed = self._runs.setdefault(run_id, _Followed())
        self._runs.move_to_end(run_id)
        await followed.catch_up(self._store, run_id)
        while len(self._runs) > 1 and sum(each.table.nbytes for each in self._runs.values()) > self._most:
            self._runs.popitem(last=False)
        return followed.table

    def forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def __len__(self) -> int:
        return len(self._runs)


class _Followed:
    """A table, and how far into the stream it has come."""

    def __init__(self) -> None:
        self.table = Table()
        self._after: str | None = None
        self._at = -math.inf
        self._busy = asyncio.Lock()

    async def catch_up(self, store: Store, run_id: str) -> None:
        async with self._busy:  # those who ask while one reads share what it reads
            while time.monotonic() - self._at >= FRESH_SECONDS:
                entries = await store.entries(run_id, "metrics", after=self._after, count=PAGE)
                for name, row in entries:
                    self.table.add(row)
                    self._after = name
                if len(entries) < PAGE:
                    self._at = time.monotonic()
                await asyncio.sleep(0)


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name == "step":
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", float(each)) for key, each in value.items() if _is_number(each))
        elif _is_number(value):
            yield name, float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bucket_starts(steps: NDArray[np.int64], points: int) -> NDArray[np.intp]:
    """Indices at which a bucket begins; at most ``points`` of them."""
    width = max(1, -(-int(steps[-1] - steps[0] + 1) // points))
    while True:
        starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
        if len(starts) <= points:
            return starts
        width += 1  # the range is not aligned: it touches one bucket more than it fills


def _means(column: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    there = np.isfinite(column)
    counts = np.add.reduceat(there, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(there, column, 0.0), starts)
    means: NDArray[np.float64] = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


def _with_nulls(column: NDArray[np.float64]) -> list[float | None]:
    values: list[float | None] = column.tolist()
    for i in np.flatnonzero(~np.isfinite(column)).tolist():
        values[i] = None
    return values
