"""The slot buffer: where groups wait to be trained on, and the reason no token is ever older than the allowed lag.

A group that starts at version ``o`` must be trained on while the learner's version is at most ``o + L``: that version
is its deadline. Groups finish in any order. Two rules keep every deadline reachable, whatever the order:

admit   only if, for every version ``d``, the open groups due by ``d`` fit in the batches left until then;
take    a batch (earliest deadline first) only if the groups left behind still fit in the batches left after it.

Both are the same test, `_fits`: with P groups per batch, at most ``(d - v + 1) * P`` open groups may be due by ``d``
when the learner is at version ``v``. A late group therefore delays nobody until the learner waits for its deadline.

A run asks both questions for every group, so neither looks at the groups: open groups are counted by deadline, and
there are only about L + 1 deadlines, however many groups are open.
"""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    deadline: int
    lag: int
    ready: T | None = None


class SlotBuffer(Generic[T]):
    """The open groups by id, and the slots they take. Used from one event loop only.

    Args:
        batch: P, groups in one batch.
        max_lag: L, how many versions old a token may be when it is trained on. It may be changed at any time; open
            groups keep the bound under which they were admitted.

    Batches of two with a lag of one make four slots. All are taken by groups that start at version 0, so the learner,
    at version 0, must train on all of them before it is past version 1:

    >>> buffer = SlotBuffer[str](batch=2, max_lag=1)
    >>> for group in (0, 1, 2, 3):
    ...     buffer.admit(group, started_at=0)
    >>> buffer.can_admit(started_at=0, version=0)
    False

    Group 0 is slow. It delays nobody yet, because it fits in the next batch:

    >>> for group in (1, 2, 3):
    ...     buffer.put(group, f"group {group}", oldest_version=0)
    >>> buffer.take(version=0)
    [(1, 'group 1'), (2, 'group 2')]

    The learner is at version 1. The slots of the batch are free once the actors serve that version:

    >>> buffer.can_admit(started_at=1, version=1)
    False
    >>> buffer.release(2)
    >>> buffer.can_admit(started_at=1, version=1)
    True
    >>> for group in (4, 5):
    ...     buffer.admit(group, started_at=1)

    Groups 3 and 4 would make a batch, but then group 0 would be trained on at version 2, too late. The learner waits:

    >>> buffer.put(4, "group 4", oldest_version=1)
    >>> buffer.take(version=1) is None
    True
    >>> buffer.waiting_for(version=1)
    [0]
    >>> buffer.put(0, "group 0", oldest_version=0)
    >>> buffer.take(version=1)
    [(0, 'group 0'), (3, 'group 3')]
    """

    def __init__(self, batch: int, max_lag: int) -> None:
        self.batch, self.max_lag = batch, max_lag
        self._open: dict[int, _Slot[T]] = {}
        self._due: Counter[int] = Counter()  # open groups by deadline
        self._due_ready: Counter[int] = Counter()  # ready groups by deadline
        self._unreleased = 0

    @property
    def slots(self) -> int:
        """The number of slots, free or not."""
        return (self.max_lag + 1) * self.batch

    def __len__(self) -> int:
        """The number of open groups: admitted, and neither taken nor dropped."""
        return len(self._open)

    @property
    def ready(self) -> int:
        """The number of open groups that are generated and scored."""
        return self._due_ready.total()

    @property
    def unreleased(self) -> int:
        """The slots of groups that were taken and are not released."""
        return self._unreleased

    def can_admit(self, *, started_at: int, version: int) -> bool:
        """Whether one more group may start, with actors serving ``started_at`` and the learner at ``version``."""
        if len(self._open) + self._unreleased >= self.slots:
            return False
        due = self._due.copy()
        due[started_at + self.max_lag] += 1
        return self._fits(due, version)

    def admit(self, group_id: int, *, started_at: int, lag: int | None = None) -> None:
        """Give a group a slot.

        Args:
            started_at: its tokens will be of this version or a newer one.
            lag: its bound on lag, in place of `max_lag`.
        """
        lag = self.max_lag if lag is None else lag
        self._open[group_id] = slot = _Slot[T](started_at + lag, lag)
        self._count(slot, 1)

    def put(self, group_id: int, item: T, *, oldest_version: int) -> None:
        """Store a ready group whose oldest token is of ``oldest_version``."""
        slot = self._open[group_id]
        self._count(slot, -1)
        slot.ready, slot.deadline = item, max(slot.deadline, oldest_version + slot.lag)
        self._count(slot, 1)

    def ready_items(self) -> list[T]:
        """The ready groups that were not taken, in order of admission."""
        return [item for _, slot in sorted(self._open.items()) if (item := slot.ready) is not None]

    def drop(self, group_id: int) -> None:
        """Remove a group that will not be trained on. Its slot is free immediately."""
        self._close(group_id)

    def lag_of(self, group_id: int) -> int:
        """The bound on lag under which the open group was admitted."""
        return self._open[group_id].lag

    def can_take(self, version: int) -> bool:
        """Whether `take` would return a batch."""
        return self.ready >= self.batch and self._fits(self._left_behind(), version + 1)

    def take(self, version: int) -> list[tuple[int, T]] | None:
        """The next batch for a learner at ``version``, in order of admission, or None if there is none yet.

        Its slots stay taken until `release`.
        """
        if not self.can_take(version):
            return None
        ready = ((slot.deadline, gid) for gid, slot in self._open.items() if slot.ready is not None)
        chosen = sorted(
            gid for _, gid in heapq.nsmallest(self.batch, ready)
        )  # looks at every group, but only once per batch
        taken = [(gid, item) for gid in chosen if (item := self._close(gid)) is not None]
        self._unreleased += len(taken)
        return taken

    def release(self, count: int) -> None:
        """Free ``count`` slots of trained groups, once the actors serve the weights that those groups produced."""
        self._unreleased -= count

    def waiting_for(self, version: int) -> list[int]:
        """The ids of groups that are due at ``version`` and not ready: the groups that the learner waits for."""
        return sorted(gid for gid, slot in self._open.items() if slot.ready is None and slot.deadline <= version)

    def _left_behind(self) -> Counter[int]:
        """The open groups by deadline, without those that the next batch takes."""
        left, to_take = self._due.copy(), self.batch
        for deadline, count in sorted(self._due_ready.items()):
            left[deadline] -= min(to_take, count)
            to_take -= min(to_take, count)
        return left

    def _fits(self, due_by: Mapping[int, int], version: int) -> bool:
        due = 0
        for deadline, count in sorted(due_by.items()):
            due += count
            if count and due > (deadline - version + 1) * self.batch:
                return False
        return True

    def _close(self, group_id: int) -> T | None:
        slot = self._open.pop(group_id)
        self._count(slot, -1)
        return slot.ready

    def _count(self, slot: _Slot[T], by: int) -> None:
        for counts in (self._due, self._due_ready) if slot.ready is not None else (self._due,):
            counts[slot.deadline] += by
            if not counts[slot.deadline]:
                del counts[slot.deadline]
