"""Moves what a rank keeps on its GPU to the host's memory and back, for actors that use the same GPU meanwhile.

DeepSpeed moves weights and gradients. Master copies and moments it would only move for an AdamW of its own, so they are
moved here. No number changes by it.
"""

import gc
from collections.abc import Iterable, Iterator

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from learner.checkpoint import MOMENTS
from learner.engine import Engine
from learner.sparing import spare

MOVED_BY_DEEPSPEED = (
    OffloadStateTypeEnum.lp_params,
    OffloadStateTypeEnum.lp_grads,
    OffloadStateTypeEnum.contiguous_grad_buffer,
)


def move_away(engines: Iterable[Engine], frozen: nn.Module | None) -> None:
    """Move the state of ``engines``, and the weights of ``frozen``, to the host's memory."""
    for engine in engines:
        engine.zero.offload_states(include=MOVED_BY_DEEPSPEED)
        for tensor in _owned_by_adamw(engine):
            tensor.data = tensor.data.cpu()
    if frozen is not None:
        frozen.cpu()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def move_back(engines: Iterable[Engine], frozen: nn.Module | None, device: torch.device) -> None:
    """Undo `move_away`."""
    for engine in engines:
        engine.zero.reload_states()
        for tensor in _owned_by_adamw(engine):
            tensor.data = tensor.data.to(device)
        spare(engine.zero)  # float32 weights and their master copies came back as two
    if frozen is not None:
        frozen.to(device)


def _owned_by_adamw(engine: Engine) -> Iterator[Tensor]:
    """The master copies, and after the first step the moments."""
    yield from engine.zero.fp32_partitioned_groups_flat
    for state in engine.adam.state.values():
        yield from (state[name] for name in MOMENTS if name in state)
