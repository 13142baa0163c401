"""The slot buffer: where groups wait, and the reason no token is ever older than the allowed lag.

A group that starts at version ``o`` must be trained while the learner's version is at most ``o + L``: that version
is its deadline. Groups finish in any order. Two rules keep every deadline reachable, whatever the order:

admit   only if, for every version ``d``, the open groups due by ``d`` fit in the batches left until then;
take    a batch (earliest deadline first) only if the groups left behind still fit in the batches left after it.

Both are the same test, `_fits`: with P groups to a batch, at most ``(d - v + 1) * P`` open groups may be due by
``d`` when the learner is at version ``v``. Groups that finish late therefore hold nobody back until their own
deadline makes the learner wait for them.

A run asks both questions at every group, so neither looks at the groups: open groups are counted by deadline, of which
there are about L + 1 however many groups are open.
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
    """Open groups by id; bounded by ``slots``; single-threaded (one event loop owns it).

    Args:
        batch: P, groups in one batch.
        max_lag: L, versions a token may be old when it is trained on. It may be changed at any time; open groups keep
            the bound they were admitted under.
    """

    def __init__(self, batch: int, max_lag: int) -> None:
        self.batch, self.max_lag = batch, max_lag
        self._open: dict[int, _Slot[T]] = {}
        self._due: Counter[int] = Counter()  # open groups by deadline
        self._due_ready: Counter[int] = Counter()  # those of them that are ready
        self._held = 0  # slots of groups that are trained, until the actors serve the weights they made

    @property
    def slots(self) -> int:
        """Groups that may be open or held at once."""
        return (self.max_lag + 1) * self.batch

    def __len__(self) -> int:
        """Open groups: admitted, neither taken nor dropped."""
        return len(self._open)

    @property
    def ready(self) -> int:
        """Open groups that are generated and scored."""
        return self._due_ready.total()

    @property
    def held(self) -> int:
        """Slots of groups that are trained, until the actors serve the weights they made."""
        return self._held

    def can_admit(self, *, started_at: int, version: int) -> bool:
        """May one more group start, with actors serving ``started_at`` and the learner at ``version``?"""
        if len(self._open) + self._held >= self.slots:
            return False
        due = self._due.copy()
        due[started_at + self.max_lag] += 1
        return self._fits(due, version)

    def admit(self, group_id: int, *, started_at: int, lag: int | None = None) -> None:
        """Give the group a slot; its tokens will be of version ``started_at`` or newer, under ``lag`` or `max_lag`."""
        lag = self.max_lag if lag is None else lag
        self._open[group_id] = slot = _Slot[T](started_at + lag, lag)
        self._count(slot, 1)

    def put(self, group_id: int, item: T, *, oldest_version: int) -> None:
        """The group is ready; its oldest token is of ``oldest_version``."""
        slot = self._open[group_id]
        self._count(slot, -1)
        slot.ready, slot.deadline = item, max(slot.deadline, oldest_version + slot.lag)
        self._count(slot, 1)

    def ready_items(self) -> list[T]:
        """What is ready and not taken, in order of admission."""
        return [item for _, slot in sorted(self._open.items()) if (item := slot.ready) is not None]

    def drop(self, group_id: int) -> None:
        """The group will not be trained; its slot is free at once."""
        self._close(group_id)

    def lag_of(self, group_id: int) -> int:
        """The bound the open group was admitted under."""
        return self._open[group_id].lag

    def can_take(self, version: int) -> bool:
        """Would `take` give a batch?"""
        return self.ready >= self.batch and self._fits(self._left_behind(), version + 1)

    def take(self, version: int) -> list[tuple[int, T]] | None:
        """The next batch for a learner at ``version``, in order of admission, or None until it can be made.

        Its slots stay held until `release`.
        """
        if not self.can_take(version):
            return None
        ready = ((slot.deadline, gid) for gid, slot in self._open.items() if slot.ready is not None)
        chosen = sorted(gid for _, gid in heapq.nsmallest(self.batch, ready))  # once a batch, not once a group
        taken = [(gid, item) for gid in chosen if (item := self._close(gid)) is not None]
        self._held += len(taken)
        return taken

    def release(self, count: int) -> None:
        """``count`` slots of trained groups are free: the actors serve the weights that those groups made."""
        self._held -= count

    def waiting_for(self, version: int) -> list[int]:
        """Ids of the groups that are due at ``version`` and not ready: whom the learner waits for."""
        return sorted(gid for gid, slot in self._open.items() if slot.ready is None and slot.deadline <= version)

    def _left_behind(self) -> Counter[int]:
        """Open groups by deadline without those that the next batch takes."""
        left, room = self._due.copy(), self.batch
        for deadline, count in sorted(self._due_ready.items()):
            left[deadline] -= min(room, count)
            room -= min(room, count)
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
