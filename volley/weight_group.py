"""A process group for weights alone: the learner's first rank sends, the processes that hold an engine's model receive.

Its backend is NCCL where both sides have GPUs and gloo elsewhere; nothing else differs. Members are fixed: when the
actors change, another group is formed and the old one told to end. Whatever goes wrong in here is an error within a
bound, and the object store has the same weights.

    learner rank 0   announce(v) ── size, file ── size, file ── 0 ── received(v)?
    receivers        awaited()    ──────── next_file() until None ── confirm(v)
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from volley.errors import DeadlineExceeded

if TYPE_CHECKING:
    from torch import Tensor

SENDER = 0
POLL_SECONDS = 0.0005
END = "end"  # announced in place of a version


@dataclass(frozen=True, slots=True)
class WeightGroupTerms:
    """What every member must agree on.

    Attributes:
        host: where the learner's first rank listens, with ``port``.
        name: of this group among the learner's.
        members: actors by name, with the number of processes that hold its model.
        cuda: both sides have GPUs.
        digests: receivers say the checksum of what they got.
        deadline_s: bound of joining, of each broadcast, and of the receivers' answers to a version.
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
        """The ranks of an actor's processes."""
        first = 1
        for name, count in self.members:
            if name == actor:
                return range(first, first + count)
            first += count
        raise ValueError(f"{actor} is no member of weight group {self.name}")


class WeightGroup:
    """One member's end. Its calls block; each gives up after the group's deadline. Used by one thread at a time.

    Raises:
        DeadlineExceeded: not all members joined in time.
        RuntimeError: of torch, when another member is gone.
    """

    def __init__(self, terms: WeightGroupTerms, rank: int) -> None:
        import torch
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self.terms, self.rank, self._sequence = terms, rank, 0
        self._bound = timedelta(seconds=terms.deadline_s)
        self._device = torch.device("cuda", torch.cuda.current_device()) if terms.cuda else torch.device("cpu")
        client = TCPStore(terms.host, terms.port, is_master=False, wait_for_workers=False, timeout=self._bound)
        self._store = PrefixStore(f"weights/{terms.name}", client)
        self._store.set(f"here/{rank}", "")
        if not self._has([f"here/{each}" for each in range(terms.size)], terms.deadline_s):
            awaited = f"all {terms.size} members of weight group {terms.name}"
            raise DeadlineExceeded(f"rank {rank}", awaited, terms.deadline_s)
        self._group: Any = _backend(self._store, rank, terms)
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device))  # connects

    # ---- the sender ------------------------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """Have the receivers ready for files of ``version``."""
        self._store.set(f"next/{self._sequence}", str(version))
        self._sequence += 1

    def send(self, file: "Tensor") -> None:
        """A file to every receiver: uint8 [bytes], on any device; returns when it may be changed."""
        self._size(file.numel())
        self._broadcast(file.to(self._device))

    def send_end(self) -> None:
        """There are no more files of this version."""
        self._size(0)

    def received(self, version: int, checksum: str | None) -> tuple[frozenset[str], str]:
        """The actors that have all of ``version``, and why not all of them have.

        Args:
            checksum: an actor whose own differs has not got it; None where digests are off.
        """
        problem = ""
        try:
            self._meet()  # a member that is gone shows at once, one that hangs at the deadline
        except (DeadlineExceeded, RuntimeError) as error:
            problem = str(error)
        names = frozenset(name for name, _ in self.terms.members if self._got(name, version, checksum))
        if len(names) < len(self.terms.members):
            problem = problem or "what an actor got is not what was sent"
        return names, problem

    def _got(self, actor: str, version: int, checksum: str | None) -> bool:
        keys = [f"got/{version}/{rank}" for rank in self.terms.ranks(actor)]
        if not self._store.check(keys):
            return False
        return checksum is None or all(self._store.get(key).decode() == checksum for key in keys)

    # ---- a receiver ------------------------------------------------------------------------------------------------

    def awaited(self, seconds: float) -> int | None:
        """The next version announced; None if there was none within ``seconds``. Raises `EOFError` at the end."""
        key = f"next/{self._sequence}"
        if not self._has([key], seconds):
            return None
        self._sequence += 1
        said = self._store.get(key).decode()
        if said == END:
            raise EOFError(f"weight group {self.terms.name} has ended")
        return int(said)

    def next_size(self) -> int:
        """Bytes of the next file; 0 after the last one."""
        return self._size(0)

    def receive(self, into: "Tensor") -> None:
        """Fill ``into``, uint8 [bytes] on the CPU, with the next file."""
        import torch

        if self._device.type == "cpu":
            self._broadcast(into)
        else:
            staged = torch.empty_like(into, device=self._device)
            self._broadcast(staged)
            into.copy_(staged)

    def confirm(self, version: int, checksum: str) -> None:
        """Tell the sender that all of ``version`` is here; ``checksum`` is empty where digests are off."""
        self._store.set(f"got/{version}/{self.rank}", checksum)
        self._meet()

    # ---- both ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave. The sender's leaving ends the group for all."""
        if self.rank == SENDER:
            self._store.set(f"next/{self._sequence}", END)
        self._group.abort()
        self._group = None  # gloo leaves its peers with this

    def _size(self, nbytes: int) -> int:
        import torch

        size = torch.tensor([nbytes], dtype=torch.int64, device=self._device)
        self._broadcast(size)
        return int(size.item())

    def _broadcast(self, tensor: "Tensor") -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._bound
        self._wait(self._group.broadcast([tensor], options))

    def _meet(self) -> None:
        import torch
        from torch.distributed import AllreduceOptions

        options = AllreduceOptions()
        options.timeout = self._bound
        self._wait(self._group.allreduce([torch.zeros(1, dtype=torch.uint8, device=self._device)], options))

    def _wait(self, work: Any) -> None:
        ends = time.monotonic() + self.terms.deadline_s
        while not work.is_completed():  # NCCL has no wait with a bound
            if time.monotonic() > ends:
                raise DeadlineExceeded(f"rank {self.rank}", f"weight group {self.terms.name}", self.terms.deadline_s)
            time.sleep(POLL_SECONDS)
        work.wait()  # raises what went wrong

    def _has(self, keys: Sequence[str], seconds: float) -> bool:
        from torch.distributed import DistStoreError

        try:
            self._store.wait(list(keys), timedelta(milliseconds=math.ceil(1000 * seconds)))
        except DistStoreError:  # not in time; a lost store is another error
            return False
        return True


def _backend(store: Any, rank: int, terms: WeightGroupTerms) -> Any:
    from torch import distributed

    if not terms.cuda:
        return distributed.ProcessGroupGloo(store, rank, terms.size, timedelta(seconds=terms.deadline_s))
    options = distributed.ProcessGroupNCCL.Options()
    # NCCL's watchdog would end the whole process: it must never come before our own deadline.
    options._timeout = timedelta(seconds=2 * terms.deadline_s + 60)
    return distributed.ProcessGroupNCCL(store, rank, terms.size, options)
