"""What carries the bytes of a weight group: gloo between CPUs, NCCL between GPUs.

Both have the same calls. Each returns when it is done on this side, and raises at the deadline, or as soon as another
member is known to be gone; afterwards only `close` may be called.
"""

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from volley.errors import DeadlineExceeded

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.distributed import Store, Work  # type: ignore[attr-defined]

SENDER = 0
POLL_SECONDS = 0.0005
IDENTITY = "nccl"  # key in the store


class Link(Protocol):
    """One member's end."""

    def broadcast(self, tensor: "Tensor") -> None:
        """Fill ``tensor`` with the sender's."""
        ...

    def meet(self) -> None:
        """Wait until every member has called it."""
        ...

    def close(self) -> None:
        """Leave. Calls of others that wait for this member fail, over NCCL at their deadline."""
        ...


class GlooLink:
    """Torch's gloo group, which notices at once that a member is gone."""

    def __init__(self, store: "Store", rank: int, size: int, deadline_s: float) -> None:
        from torch.distributed import ProcessGroupGloo

        self._rank, self._deadline = rank, deadline_s
        self._bound = timedelta(seconds=deadline_s)
        self._group = ProcessGroupGloo(store, rank, size, self._bound)

    def broadcast(self, tensor: "Tensor") -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._bound
        self._wait(self._group.broadcast([tensor], options))  # type: ignore[attr-defined]

    def meet(self) -> None:
        import torch
        from torch.distributed import AllreduceOptions

        options = AllreduceOptions()
        options.timeout = self._bound
        work = self._group.allreduce([torch.zeros(1, dtype=torch.uint8)], options)  # type: ignore[attr-defined]
        self._wait(work)

    def close(self) -> None:
        self._group.abort()
        del self._group  # gloo only disconnects when the group is destroyed

    def _wait(self, work: "Work") -> None:
        ends = time.monotonic() + self._deadline
        while not work.is_completed():
            _sleep_until(ends, self._rank, self._deadline)
        work.wait()  # raises the error, if any


def import_nccl() -> None:
    """Import what `NcclLink` needs, which takes seconds, before others wait for this member."""
    import vllm.distributed.device_communicators.pynccl_wrapper  # noqa: F401


class NcclLink:
    """NCCL through vLLM's binding.

    Torch's own NCCL group is not used because its watchdog ends the whole process, here the learner's, when a member
    dies. Without one, a dead member is noticed at the deadline.
    """

    def __init__(self, store: "Store", rank: int, size: int, on: "device", deadline_s: float) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._rank, self._deadline, self._device = rank, deadline_s, on
        self._nccl = NCCLLibrary()
        if rank == SENDER:
            store.set(IDENTITY, bytes(self._nccl.ncclGetUniqueId().internal))  # type: ignore[arg-type]
        identity = self._nccl.unique_id_from_bytes(store.get(IDENTITY))
        self._stream = torch.cuda.Stream(on)  # type: ignore[no-untyped-call]
        with torch.cuda.device(on):
            self._communicator = self._nccl.ncclCommInitRank(size, identity, rank)

    def broadcast(self, tensor: "Tensor") -> None:
        from vllm.distributed.device_communicators import pynccl_wrapper as nccl

        kind, memory = nccl.ncclDataTypeEnum.from_torch(tensor.dtype), nccl.buffer_type(tensor.data_ptr())
        self._follow_current_stream()
        stream = nccl.cudaStream_t(self._stream.cuda_stream)
        self._nccl.ncclBroadcast(memory, memory, tensor.numel(), kind, SENDER, self._communicator, stream)
        self._wait()

    def meet(self) -> None:
        import torch
        from vllm.distributed.device_communicators import pynccl_wrapper as nccl

        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        kind, memory = nccl.ncclDataTypeEnum.from_torch(nothing.dtype), nccl.buffer_type(nothing.data_ptr())
        total = nccl.ncclRedOpTypeEnum.from_torch(torch.distributed.ReduceOp.SUM)
        self._follow_current_stream()
        stream = nccl.cudaStream_t(self._stream.cuda_stream)
        self._nccl.ncclAllReduce(memory, memory, 1, kind, total, self._communicator, stream)
        self._wait()

    def close(self) -> None:
        self._nccl.ncclCommAbort(self._communicator)

    def _follow_current_stream(self) -> None:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _wait(self) -> None:
        import torch

        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        ends = time.monotonic() + self._deadline
        while not done.query():  # type: ignore[no-untyped-call]
            _sleep_until(ends, self._rank, self._deadline)


def _sleep_until(ends: float, rank: int, deadline_s: float) -> None:
    """Sleep a little. Raises `DeadlineExceeded` after ``ends``."""
    if time.monotonic() > ends:
        raise DeadlineExceeded(f"rank {rank}", "the weight group", deadline_s)
    time.sleep(POLL_SECONDS)
