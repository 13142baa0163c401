"""Finds the actor with the fewest samples in flight without looking at all of them."""

import heapq
from typing import Generic, Protocol, TypeVar

SPARE = 16


class Loaded(Protocol):
    """Something with samples in flight."""

    index: int
    samples: int


T = TypeVar("T", bound=Loaded)


class LeastLoaded(Generic[T]):
    """A heap whose keys never exceed the true loads.

    A load that grew is corrected when its entry reaches the top. After a load has fallen, call `lighter`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._keys: dict[int, int] = {}  # by index; heap entries with another key are stale

    def add(self, item: T) -> None:
        """Add ``item``; no other item may have its index."""
        self._push(item)

    def remove(self, item: T) -> None:
        """Remove ``item``."""
        self._keys.pop(item.index, None)

    def lighter(self, item: T) -> None:
        """Note that the load of ``item`` may have fallen. Does nothing if ``item`` was removed."""
        if item.samples < self._keys.get(item.index, -1):
            self._push(item)

    def first(self) -> T:
        """The item with the lowest load; among equals the one with the lowest index. Raises `IndexError` if empty."""
        while True:
            key, index, item = self._heap[0]
            if self._keys.get(index) == key == item.samples:
                return item
            heapq.heappop(self._heap)
            if self._keys.get(index) == key:
                self._push(item)

    def _push(self, item: T) -> None:
        if len(self._heap) > 2 * len(self._keys) + SPARE:  # too many stale entries that never reach the top
            entries = {entry[1]: entry for entry in self._heap if self._keys.get(entry[1]) == entry[0]}
            self._heap = list(entries.values())
            heapq.heapify(self._heap)
        self._keys[item.index] = item.samples
        heapq.heappush(self._heap, (item.samples, item.index, item))
