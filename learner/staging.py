"""Brings gathered weights from a device to host memory without holding up the training that goes on there.

On CUDA the copies run on a stream of their own, into page-locked memory, which is the only kind that a GPU fills at the
full rate and beside other work. Locking pages takes long, so buffers are used again. On CPU the same buffers, of
ordinary memory, take the weights that are sent in one piece.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Bytes in host memory.

    Attributes:
        memory: uint8 [capacity].
        content: its first bytes, uint8 [bytes].
    """

    memory: torch.Tensor
    content: torch.Tensor

    @property
    def array(self) -> NDArray[np.uint8]:
        """``content`` as an array, uint8 [bytes], without a copy."""
        content: NDArray[np.uint8] = self.content.numpy()
        return content


class Staging:
    """Host buffers, and on CUDA the stream that fills them. `beside` and `copied` belong to one thread.

    Args:
        device: where the weights are.
        capacity: bytes of a buffer; larger contents get buffers of their size.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._capacity, self._cuda = capacity, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def mark(self) -> "torch.cuda.Event | None":
        """The present end of the calling thread's stream, for `beside`; None on CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    @contextmanager
    def beside(self, gathered: "torch.cuda.Event | None") -> Iterator[None]:
        """Within the block, what is queued on the device follows ``gathered``, and nothing queued later."""
        if self._stream is None or gathered is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(gathered)
            try:
                yield
            finally:
                self._stream.synchronize()  # afterwards tensors of the block may be freed for the other stream to use

    def copied(self, parts: Sequence[torch.Tensor]) -> HostBuffer:
        """Copy ``parts``, uint8 [bytes] each, end to end into a buffer; returns when it is filled."""
        buffer = self._buffer(sum(part.numel() for part in parts))
        end = 0
        for part in parts:
            begin, end = end, end + part.numel()
            buffer.content[begin:end].copy_(part, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Let later contents use the memory of ``buffer``. Any thread may call it."""
        with self._lock:
            self._free.append(buffer.memory)

    def _buffer(self, nbytes: int) -> HostBuffer:
        with self._lock:
            fitting = [index for index, memory in enumerate(self._free) if memory.numel() >= nbytes]
            smallest = min(fitting, key=lambda index: self._free[index].numel(), default=None)
            memory = None if smallest is None else self._free.pop(smallest)
        if memory is None:
            memory = torch.empty(max(nbytes, self._capacity), dtype=torch.uint8, pin_memory=self._cuda)
        return HostBuffer(memory, memory[:nbytes])
