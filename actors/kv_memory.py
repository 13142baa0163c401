"""An engine's KV cache in memory that the kernel provides, as zeros, when it is first used.

vLLM fills the whole cache with zeros before its engine answers. That takes time, more on a virtual machine whose host
has yet to find the memory, and all of the cache is resident from then on, used or not.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
T = TypeVar("T")
_mapped: WeakSet[mmap.mmap] = WeakSet()  # by `mapped_zeros`


def provide_on_first_use() -> None:
    """Let vLLM allocate the caches of this process so. For engines on CPUs, before they allocate any."""
    from vllm.v1.worker import gpu_model_runner, utils

    if gpu_model_runner.allocate_kv_cache is utils.allocate_kv_cache:
        gpu_model_runner.allocate_kv_cache = _lazily(utils.allocate_kv_cache)


def _lazily(allocate: Callable[P, T]) -> Callable[P, T]:
    def allocate_lazily(*args: P.args, **kwargs: P.kwargs) -> T:
        with _LazyZeros():
            return allocate(*args, **kwargs)

    return allocate_lazily


def give_back() -> None:
    """Give the memory of all caches of this process back to the kernel. They are zeros then, as at first."""
    for memory in _mapped:
        memory.madvise(mmap.MADV_DONTNEED)


class _LazyZeros(TorchFunctionMode):
    """Within this mode, the memory of ``torch.zeros`` is mapped, not written."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.zeros:
            return mapped_zeros(*args, **kwargs or {})  # type: ignore[arg-type]
        return func(*args, **kwargs or {})


def mapped_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.zeros`` on a CPU whose pages take memory only once they are used. The address is that of a page."""
    if device.type != "cpu":
        raise ValueError(f"memory can be mapped on CPUs only, not on {device}")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # a fault per 2 MiB rather than per 4 KiB
    _mapped.add(memory)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
