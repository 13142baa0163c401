"""Moves what a rank keeps on its GPU to the host's memory and back, for actors that use the same GPU meanwhile.

DeepSpeed moves gradients. Its own way to move weights supposes that all are trained, and that AdamW is its own; so
weights, their master copies and the moments are moved here. No number changes by it.
"""

import gc
from collections.abc import Iterable

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.utils import get_mapping_to_flat_buffer
from torch import nn

from learner.checkpoint import MOMENTS
from learner.engine import Engine

GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)
HOST = torch.device("cpu")


def move_away(engines: Iterable[Engine], frozen: nn.Module | None, *, lent: Engine | None = None) -> None:
    """Move the state of ``engines``, and the weights of ``frozen``, to the host's memory.

    Args:
        lent: one of ``engines`` whose weights stay, until `move_lent_away`.
    """
    for engine in engines:
        engine.zero.offload_states(include=GRADIENTS)  # also shards the weights that are whole
        if engine is not lent:
            _move_weights(engine, HOST)
        _move_optimizer(engine, HOST)
    if frozen is not None:
        frozen.to(HOST)
    _give_back()


def move_lent_away(lent: Engine) -> None:
    """Also move the weights of ``lent``, which nobody reads any more."""
    _move_weights(lent, HOST)
    _give_back()


def move_back(engines: Iterable[Engine], frozen: nn.Module | None, device: torch.device) -> None:
    """Undo `move_away`."""
    for engine in engines:
        _move_weights(engine, device)
        _move_optimizer(engine, device)
        engine.zero.reload_states()
    if frozen is not None:
        frozen.to(device)


def _move_weights(engine: Engine, device: torch.device) -> None:
    zero = engine.zero
    trained = zero._get_parameter_partitions()
    zero.lp_param_buffer.data = zero.lp_param_buffer.data.to(device, copy=True)
    for shard, offset, elements in get_mapping_to_flat_buffer(trained):
        shard.data = zero.lp_param_buffer.narrow(0, offset, elements)
    seen = {id(shard) for shard in trained}
    for parameter in engine.module.parameters():
        if id(parameter.ds_tensor) not in seen:
            parameter.ds_tensor.data = parameter.ds_tensor.data.to(device, copy=True)
    zero.fp16_partitioned_groups_flat.clear()
    zero._set_fp16_partitioned_groups_flat()
    for flat, master in _masters(engine):
        if flat.dtype == master.dtype:  # both are the same memory, see `learner.sparing`
            master.data = flat.data


def _move_optimizer(engine: Engine, device: torch.device) -> None:
    for flat, master in _masters(engine):
        if flat.dtype != master.dtype:
            master.data = master.data.to(device, copy=True)
    for state in engine.adam.state.values():
        for name in MOMENTS:
            if name in state:
                state[name].data = state[name].data.to(device, copy=True)


def _masters(engine: Engine) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """The flat weights, each with its master copy."""
    zero = engine.zero
    return zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True)


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what was lent
        torch.cuda.empty_cache()
