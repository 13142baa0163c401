"""A process group that carries weights: learner rank 0 sends, the engine processes that hold a model receive.

NCCL carries the bytes if both sides have GPUs, otherwise gloo: `volley.weight_links`. Members are fixed: when the
actors change, a new group forms and the old one ends. Every failure becomes an error within a deadline, and the object
store then carries the same weights.

    learner rank 0   announce(v) ── size, file ── size, file ── 0 ── received(v)?
    receivers        awaited()    ──────── next_file() until None ── confirm(v)
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from volley.errors import DeadlineExceeded
from volley.weight_links import SENDER, GlooLink, Link, NcclLink, import_nccl

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
END = "end"  # announced instead of a version


@dataclass(frozen=True, slots=True)
class WeightGroupTerms:
    """What every member must agree on.

    Attributes:
        host: where learner rank 0 listens, with ``port``.
        name: unique among the learner's groups.
        members: actors by name, each with the number of engine processes that hold its model.
        cuda: True if both sides have GPUs.
        digests: receivers confirm a version with a checksum of what they received.
        deadline_s: limit on joining, on each broadcast, and on the receivers' confirmations.
    """

    host: str
    port: int
    name: str
    members: tuple[tuple[str, int], ...]
    cuda: bool
    digests: bool
    deadline_s: float

    @property
    def size(self) -> int:
        return 1 + sum(count for _, count in self.members)

    def ranks(self, actor: str) -> range:
        """The ranks of an actor's engine processes."""
        first = 1
        for name, count in self.members:
            if name == actor:
                return range(first, first + count)
            first += count
        raise ValueError(f"{actor} is not a member of weight group {self.name}")


class WeightGroup:
    """One member's end. Calls block, each at most until the group's deadline. Use it from one thread at a time.

    Raises:
        DeadlineExceeded: not all members joined in time.
        RuntimeError: another member is gone.
    """

    def __init__(self, terms: WeightGroupTerms, rank: int) -> None:
        import torch
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        if terms.cuda:
            import_nccl()
        self.terms, self.rank, self._sequence = terms, rank, 0
        self._device = torch.device("cuda", torch.cuda.current_device()) if terms.cuda else torch.device("cpu")
        bound = timedelta(seconds=terms.deadline_s)
        client = TCPStore(terms.host, terms.port, is_master=False, wait_for_workers=False, timeout=bound)
        self._store = PrefixStore(f"weights/{terms.name}", client)
        self._store.set(f"here/{rank}", "")
        if not self._has([f"here/{each}" for each in range(terms.size)], terms.deadline_s):
            awaited = f"all {terms.size} members of weight group {terms.name}"
            raise DeadlineExceeded(f"rank {rank}", awaited, terms.deadline_s)
        self._link: Link
        if terms.cuda:
            self._link = NcclLink(self._store, rank, terms.size, self._device, terms.deadline_s)
        else:
            self._link = GlooLink(self._store, rank, terms.size, terms.deadline_s)
        try:
            self._link.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device))  # connects
        except BaseException:
            self._link.close()
            raise

    # ---- the sender ------------------------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """Tell the receivers that files of ``version`` follow."""
        self._store.set(f"next/{self._sequence}", str(version))
        self._sequence += 1

    def send(self, file: "Tensor") -> None:
        """Send a file, uint8 [bytes] on any device, to every receiver; returns when ``file`` may be changed."""
        self._size(file.numel())
        self._link.broadcast(file.to(self._device))

    def send_end(self) -> None:
        """Tell the receivers that this version has no more files."""
        self._size(0)

    def received(self, version: int, checksum: str | None) -> tuple[frozenset[str], str]:
        """Wait for the receivers' confirmations; returns the actors that have all of ``version``, and what went wrong.

        Args:
            checksum: actors that confirm another one do not count; None if digests are off.
        """
        problem = ""
        try:
            self._link.meet()  # fails at once if a member is gone, at the deadline if one hangs
        except (DeadlineExceeded, RuntimeError) as error:
            problem = str(error)
        names = frozenset(name for name, _ in self.terms.members if self._got(name, version, checksum))
        if len(names) < len(self.terms.members):
            problem = problem or "an actor received other weights than were sent"
        return names, problem

    def _got(self, actor: str, version: int, checksum: str | None) -> bool:
        keys = [f"got/{version}/{rank}" for rank in self.terms.ranks(actor)]
        if not self._store.check(keys):
            return False
        return checksum is None or all(self._store.get(key).decode() == checksum for key in keys)

    # ---- a receiver ------------------------------------------------------------------------------------------------

    def awaited(self, seconds: float) -> int | None:
        """The next announced version; None after ``seconds`` without one. Raises `EOFError` when the group ends."""
        key = f"next/{self._sequence}"
        if not self._has([key], seconds):
            return None
        self._sequence += 1
        announced = self._store.get(key).decode()
        if announced == END:
            raise EOFError(f"weight group {self.terms.name} has ended")
        return int(announced)

    def next_size(self) -> int:
        """Bytes of the next file; 0 after the last one."""
        return self._size(0)

    def receive(self, into: "Tensor") -> None:
        """Receive the next file into ``into``, uint8 [bytes] on the CPU or on the group's device."""
        import torch

        if into.device == self._device:
            self._link.broadcast(into)
        else:
            staged = torch.empty_like(into, device=self._device)
            self._link.broadcast(staged)
            into.copy_(staged)

    def confirm(self, version: int, checksum: str) -> None:
        """Confirm to the sender that all of ``version`` has arrived; ``checksum`` is "" if digests are off."""
        self._store.set(f"got/{version}/{self.rank}", checksum)
        self._link.meet()

    # ---- both ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group; when the sender leaves, it ends for all. Nothing else may be called afterwards."""
        if self.rank == SENDER:
            self._store.set(f"next/{self._sequence}", END)
        self._link.close()
        del self._link

    def _size(self, nbytes: int) -> int:
        import torch

        size = torch.tensor([nbytes], dtype=torch.int64, device=self._device)
        self._link.broadcast(size)
        return int(size.item())

    def _has(self, keys: Sequence[str], seconds: float) -> bool:
        from torch.distributed import DistStoreError

        try:
            self._store.wait(list(keys), timedelta(milliseconds=math.ceil(1000 * seconds)))
        except DistStoreError:  # timed out; a lost store raises another error
            return False
        return True


def close_quietly(group: WeightGroup) -> None:
    """Close a group whose other members, or whose store, may be gone."""
    try:
        group.close()
    except RuntimeError as error:
        logger.warning("weight group %s: closing failed: %s", group.terms.name, error)
