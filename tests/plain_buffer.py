"""The slot buffer's rules implemented a second time, plainly: every method goes through all open groups.

`services.coordinator.buffer.SlotBuffer` must give the same answers, and benchmarks compare its speed with this one.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    deadline: int
    lag: int
    ready: T | None = None


class PlainSlotBuffer(Generic[T]):
    """Open groups by id; bounded by ``slots``; single-threaded (one event loop owns it).

    Args:
        batch: P, groups in one batch.
        max_lag: L, versions a token may be old when it is trained on. It may be changed at any time; open groups keep
            the bound they were admitted under.
    """

    def __init__(self, batch: int, max_lag: int) -> None:
        self.batch, self.max_lag = batch, max_lag
        self._open: dict[int, _Slot[T]] = {}
        self._unreleased = 0  # slots of trained groups whose weights the actors do not serve yet

    @property
    def slots(self) -> int:
        """Groups that may be open or unreleased at once."""
        return (self.max_lag + 1) * self.batch

    def __len__(self) -> int:
        """Open groups: admitted, neither taken nor dropped."""
        return len(self._open)

    @property
    def ready(self) -> int:
        """Open groups that are generated and scored."""
        return sum(slot.ready is not None for slot in self._open.values())

    @property
    def unreleased(self) -> int:
        """Slots of trained groups whose weights the actors do not serve yet."""
        return self._unreleased

    def can_admit(self, *, started_at: int, version: int) -> bool:
        """Whether another group may start while actors serve ``started_at`` and the learner is at ``version``."""
        if len(self._open) + self._unreleased >= self.slots:
            return False
        deadlines = [slot.deadline for slot in self._open.values()]
        return self._fits([*deadlines, started_at + self.max_lag], version)

    def admit(self, group_id: int, *, started_at: int, lag: int | None = None) -> None:
        """Give the group a slot; its tokens will be of version ``started_at`` or newer, under ``lag`` or `max_lag`."""
        lag = self.max_lag if lag is None else lag
        self._open[group_id] = _Slot(started_at + lag, lag)

    def put(self, group_id: int, item: T, *, oldest_version: int) -> None:
        """The group is ready; its oldest token is of ``oldest_version``."""
        slot = self._open[group_id]
        slot.ready, slot.deadline = item, max(slot.deadline, oldest_version + slot.lag)

    def ready_items(self) -> list[T]:
        """Groups that are ready and not taken, in order of admission."""
        return [item for _, slot in sorted(self._open.items()) if (item := slot.ready) is not None]

    def drop(self, group_id: int) -> None:
        """The group will not be trained; its slot is free immediately."""
        del self._open[group_id]

    def lag_of(self, group_id: int) -> int:
        """The bound the open group was admitted under."""
        return self._open[group_id].lag

    def take(self, version: int) -> list[tuple[int, T]] | None:
        """The next batch for a learner at ``version``, in order of admission, or None until it can be made.

        Its slots stay unreleased until `release`.
        """
        ready = sorted((slot.deadline, gid) for gid, slot in self._open.items() if slot.ready is not None)
        chosen = {gid for _, gid in ready[: self.batch]}
        if len(chosen) < self.batch:
            return None
        left = [slot.deadline for gid, slot in self._open.items() if gid not in chosen]
        if not self._fits(left, version + 1):
            return None
        taken = [(gid, item) for gid in sorted(chosen) if (item := self._open.pop(gid).ready) is not None]
        self._unreleased += len(taken)
        return taken

    def release(self, count: int) -> None:
        """``count`` slots of trained groups are free: the actors serve the weights that those groups made."""
        self._unreleased -= count

    def waiting_for(self, version: int) -> list[int]:
        """Ids of the groups that are due at ``version`` and not ready: whom the learner waits for."""
        return sorted(gid for gid, slot in self._open.items() if slot.ready is None and slot.deadline <= version)

    def _fits(self, deadlines: Iterable[int], version: int) -> bool:
        due = 0
        for deadline, count in sorted(Counter(deadlines).items()):
            due += count
            if due > (deadline - version + 1) * self.batch:
                return False
        return True
