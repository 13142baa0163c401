"""Who is dealt the next group: the actor with the fewest samples in flight, found without looking at all of them."""

import heapq
from typing import Generic, Protocol, TypeVar

SPARE = 16


class Laden(Protocol):
    """Something with work in flight."""

    index: int
    samples: int


T = TypeVar("T", bound=Laden)


class LeastLaden(Generic[T]):
    """A heap whose keys are never above the true loads.

    A load that grew is noticed when its entry comes up; of one that fell, `lighter` must be told.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._keys: dict[int, int] = {}  # by index; an entry with another key is of no account

    def add(self, item: T) -> None:
        """Take ``item`` up; its index is its own."""
        self._push(item)

    def remove(self, item: T) -> None:
        """Leave ``item`` out from here on."""
        self._keys.pop(item.index, None)

    def lighter(self, item: T) -> None:
        """``item`` may have less in flight than before. One that was left out stays so."""
        if item.samples < self._keys.get(item.index, -1):
            self._push(item)

    def first(self) -> T:
        """The one with the least in flight, of several the one with the lowest index; raises `IndexError` if empty."""
        while True:
            key, index, item = self._heap[0]
            if self._keys.get(index) == key == item.samples:
                return item
            heapq.heappop(self._heap)
            if self._keys.get(index) == key:
                self._push(item)

    def _push(self, item: T) -> None:
        if len(self._heap) > 2 * len(self._keys) + SPARE:  # entries of no account that never come up
            entries = {entry[1]: entry for entry in self._heap if self._keys.get(entry[1]) == entry[0]}
            self._heap = list(entries.values())
            heapq.heapify(self._heap)
        self._keys[item.index] = item.samples
        heapq.heappush(self._heap, (item.samples, item.index, item))
