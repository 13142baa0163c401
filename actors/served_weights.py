"""Reads back what an engine computes with, under the names of checkpoints: what an update really brought about.

A kernel may keep its matrix in an opaque packed form and leave the parameter empty. So linear layers are read by
multiplying with unit vectors of the default dtype: such a product has one non-zero term, so it equals a column of the
matrix exactly. Under tensor parallelism every worker must call `served_weights`; all of them get the whole weights.
"""

from collections.abc import Iterator

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


@torch.inference_mode()
def served_weights(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """The weights each layer of ``model`` computes with, by checkpoint name. For unquantised models without experts."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, torch.Tensor] = {}
    for path, layer in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        parts = [f"{parent}.{part}" if parent else part for part in packed.get(leaf, [leaf])]
        for name, tensor in _tensors_of(layer, device):
            pieces = _whole(layer, name, tensor, len(parts))
            found |= {f"{part}.{name}": piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
    return found


def _tensors_of(layer: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """This worker's shard of each of the layer's tensors."""
    for name, parameter in layer.named_parameters(recurse=False):
        if name == "weight" and isinstance(layer, LinearBase | ParallelLMHead):
            yield name, layer.quant_method.apply(layer, torch.eye(_width(layer), device=device), None).T
        else:
            yield name, parameter.clone()


def _width(layer: LinearBase | ParallelLMHead) -> int:
    if isinstance(layer, ParallelLMHead):
        return int(layer.embedding_dim)
    return int(layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else layer.input_size)


def _whole(layer: torch.nn.Module, name: str, shard: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """The whole tensor, gathered from all workers and cut into the ``parts`` that vLLM keeps as one."""
    workers = int(getattr(layer, "tp_size", 1))
    if isinstance(layer, VocabParallelEmbedding):
        return [_gathered(shard, workers, dim=0)[: layer.org_vocab_size]]
    if isinstance(layer, RowParallelLinear):
        return [_gathered(shard, workers, dim=1) if name == "weight" else shard]
    if not isinstance(layer, ColumnParallelLinear):
        sizes: list[int] = getattr(layer, "output_sizes", [])
        return [shard] if parts == 1 else list(torch.split(shard, sizes))
    sizes = list(layer.output_sizes) if parts > 1 else [shard.shape[0] * workers]
    shards = torch.split(shard, [size // workers for size in sizes])
    return [_gathered(each, workers, dim=0, copies=_copies(layer, part)) for part, each in enumerate(shards)]


def _copies(layer: ColumnParallelLinear, part: int) -> int:
    """How many workers hold the same shard: keys and values of fewer heads than there are workers are replicated."""
    return int(layer.num_kv_head_replicas) if isinstance(layer, QKVParallelLinear) and part > 0 else 1


def _gathered(shard: torch.Tensor, workers: int, *, dim: int, copies: int = 1) -> torch.Tensor:
    if workers == 1:
        return shard
    whole: torch.Tensor = tensor_model_parallel_all_gather(shard.contiguous(), dim=dim)
    return torch.cat(whole.chunk(workers, dim=dim)[::copies], dim=dim)
