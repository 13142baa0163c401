"""What keeps ZeRO-3 from holding the same numbers several times. No update changes by it.

Left to itself, DeepSpeed 0.19 keeps float32 weights twice, copies all gradients three times before they are reduced,
once more before AdamW uses them, and again to look for infinities. Each of these copies is as large as the model.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

# Elements whose gradients a CPU reduces at once; a larger parameter goes alone, without a copy.
REDUCED = 1 << 22
# Elements that AdamW updates at once, after a copy of their gradients; the same holds for larger parameters.
UPDATED = 1 << 24


class ZeroOptimizer(Protocol):
    """DeepSpeed's ZeRO-3 optimiser: flat float32 or narrow weights, and their master copies in float32."""

    fp16_partitioned_groups_flat: Sequence[Tensor | None]
    fp32_partitioned_groups_flat: Sequence[Tensor]
    has_overflow: Callable[..., bool]


def sparing_settings(*, cuda: bool) -> dict[str, Any]:
    """Keys of DeepSpeed's ``zero_optimization``. On GPUs gradients keep DeepSpeed's buffers, whose size suits NCCL."""
    on_cpu = {"contiguous_gradients": False, "reduce_bucket_size": REDUCED}  # the reduction lays them out by itself
    return {"sub_group_size": UPDATED, **({"contiguous_gradients": True} if cuda else on_cpu)}


def spare(zero: ZeroOptimizer) -> None:
    """Drop what ``zero`` holds twice. Call it before the first step."""
    for flat, master in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
        if flat is not None and (flat.dtype, flat.device) == (master.dtype, master.device):
            master.data = flat.data  # so AdamW updates float32 weights themselves
    zero.has_overflow = _left_to_the_norm


def _left_to_the_norm(partition_gradients: bool = True) -> bool:
    """In place of a look at all gradients: DeepSpeed's next step is their norm, which is finite only if they are."""
    return False
