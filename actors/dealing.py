"""Finds the actor, or environment worker, with the fewest samples in flight without looking at all of them."""

import heapq
import itertools
from typing import Generic, Protocol, TypeVar

SPARE = 16


class Loaded(Protocol):
    """Something with samples in flight, hashed by identity."""

    index: int

    @property
    def samples(self) -> int:
        """How many."""
        ...


T = TypeVar("T", bound=Loaded)


class LeastLoaded(Generic[T]):
    """A heap whose keys never exceed the true loads.

    A load that grew is corrected when its entry reaches the top. After a load has fallen, call `lighter`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, T]] = []  # load, index, and a number so that items are never compared
        self._keys: dict[T, int] = {}  # heap entries with another key are stale
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, item: T) -> None:
        """Add ``item``. Items present at the same time have different indices."""
        self._push(item)

    def remove(self, item: T) -> None:
        """Remove ``item``. Does nothing if it is not there."""
        self._keys.pop(item, None)

    def lighter(self, item: T) -> None:
        """Note that the load of ``item`` may have fallen. Does nothing if ``item`` was removed."""
        if item.samples < self._keys.get(item, -1):
            self._push(item)

    def first(self) -> T:
        """The item with the lowest load; among equals the one with the lowest index. Raises `IndexError` if empty."""
        while True:
            key, _, _, item = self._heap[0]
            if self._keys.get(item) == key == item.samples:
                return item
            heapq.heappop(self._heap)
            if self._keys.get(item) == key:
                self._push(item)

    def _push(self, item: T) -> None:
        if len(self._heap) > 2 * len(self._keys) + SPARE:  # too many stale entries that never reach the top
            entries = {entry[3]: entry for entry in self._heap if self._keys.get(entry[3]) == entry[0]}
            self._heap = list(entries.values())
            heapq.heapify(self._heap)
        self._keys[item] = item.samples
        heapq.heappush(self._heap, (item.samples, item.index, next(self._numbers), item))
