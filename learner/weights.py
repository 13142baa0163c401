"""Gathers weights from the ZeRO-3 shards: in buckets for the actors, and as a Hugging Face folder on disk."""

import json
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn

from learner.lora import FOLDER, split, write_adapters
from volley.imports import without
from volley.model import ModelSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)


Bucket = list[tuple[str, nn.Parameter]]


class TensorEntry(TypedDict):
    """A tensor in the header of a safetensors file; offsets count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def buckets(parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int) -> Iterator[Bucket]:
    """Split named parameters into buckets of at most ``bucket_bytes``; a larger parameter has a bucket of its own."""
    bucket: Bucket = []
    size = 0
    for name, parameter in parameters:
        nbytes = full_elements(parameter) * parameter.element_size()
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += nbytes
    if bucket:
        yield bucket


def full_elements(parameter: nn.Parameter) -> int:
    """Number of elements of the whole parameter, sharded or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered(bucket: Bucket, *, keep: bool) -> dict[str, torch.Tensor]:
    """The bucket's whole tensors on the CPU; {} on ranks with ``keep`` False. Every rank must call it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
        return {name: parameter.detach().cpu().clone() for name, parameter in bucket} if keep else {}


def gathered_views(bucket: Bucket) -> dict[str, torch.Tensor]:
    """The bucket's whole tensors as gathered, without a copy. Every rank must call it.

    The tensors stay valid, but the optimiser's next step changes those of resident buckets in place.
    """
    import deepspeed

    if resident(bucket):  # gathering would copy some of them
        return {name: parameter.ds_tensor.detach().view(parameter.ds_shape) for name, parameter in bucket}  # type: ignore[attr-defined]
    with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
        return {name: parameter.detach() for name, parameter in bucket}


def sent_to_first(bucket: Bucket, group: "ProcessGroup") -> dict[str, torch.Tensor]:
    """The bucket's whole tensors, copied from the shards of all ranks, on rank 0; {} on the others.

    It needs nothing of DeepSpeed, so it may run in any thread while steps are taken, until the optimiser changes the
    weights. Every rank must make the same calls in the same order.

    Args:
        group: of all ranks, used by nobody else; gloo, and so for shards on the CPU.
    """
    from torch import distributed

    shards = [parameter.ds_tensor.detach().view(-1).view(torch.uint8) for _, parameter in bucket]  # type: ignore[attr-defined]
    mine, sizes = torch.cat(shards), [len(shard) for shard in shards]
    if distributed.get_rank(group) != 0:
        distributed.gather(mine, group=group, group_dst=0)
        return {}
    of_ranks = [torch.empty_like(mine) for _ in range(group.size())]
    distributed.gather(mine, of_ranks, group=group, group_dst=0)
    pieces = zip(*(torch.split(of_rank, sizes) for of_rank in of_ranks), strict=True)
    return {name: _whole(parameter, torch.cat(each)) for (name, parameter), each in zip(bucket, pieces, strict=True)}


def _whole(parameter: nn.Parameter, padded: torch.Tensor) -> torch.Tensor:
    """The tensor of ``parameter`` from the bytes of its shards end to end, which DeepSpeed pads to equal lengths."""
    flat = padded.view(parameter.dtype)[: full_elements(parameter)]
    return flat.view(parameter.ds_shape)  # type: ignore[attr-defined]


def in_checkpoint_form(lm: "PreTrainedModel", tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` of ``lm`` under the names, and in the shapes, that checkpoints of its type have.

    In memory transformers keeps, for instance, all experts of a layer as one tensor, where a checkpoint has several of
    each. Views are returned where they suffice.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(lm, tensors)
    return converted


def resident(bucket: Bucket) -> bool:
    """True if this rank's shards are the whole tensors, as with one rank: holding them takes no extra memory."""
    return all(_shard_size(parameter) == full_elements(parameter) for _, parameter in bucket)


def _shard_size(parameter: nn.Parameter) -> int:
    return int(parameter.ds_tensor.numel()) if hasattr(parameter, "ds_tensor") else 0


def file_parts(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a safetensors file, uint8 [bytes] each: the header, then one part per tensor.

    Contiguous tensors are not copied. The format: length of the header (uint64, little-endian), JSON header padded with
    spaces to 8 bytes, tensors end to end.

    Raises:
        KeyError: a tensor's type is not in `DTYPES`.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that each starts aligned
    header: dict[str, TensorEntry] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return [head, *(tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in ordered)]


def export(lm: "PreTrainedModel", model: ModelSpec, folder: Path, bucket_bytes: int, *, write: bool) -> None:
    """Gather the model and `write_model` it. Every rank must call it, exactly one of them with ``write``."""
    state: dict[str, torch.Tensor] = {}
    for bucket in buckets(lm.named_parameters(), bucket_bytes):
        state.update(gathered(bucket, keep=write))
    if write:
        write_model(lm, state, model, folder)


def write_model(lm: "PreTrainedModel", state: Mapping[str, torch.Tensor], model: ModelSpec, folder: Path) -> None:
    """Write ``lm`` with the parameters ``state`` to ``folder`` in Hugging Face format, with the tokenizer of ``model``.

    Adapters are merged into the model, and also written separately, to a subfolder in PEFT's format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.lora is not None:
        state, adapters = split(state, model.lora)
        write_adapters(adapters, model, model.lora, folder / FOLDER)
    with without("deepspeed"):  # transformers would import it, which takes seconds, to see whether it wraps the model
        lm.save_pretrained(folder, state_dict=dict(state))
    give_usual_mode(folder.rglob("*.safetensors"))
    for name in TOKENIZER_FILES:
        if (model.folder / name).exists():
            shutil.copy2(model.folder / name, folder / name)


def give_usual_mode(files: Iterable[Path]) -> None:
    """Give ``files`` the mode of a new file: the safetensors library makes them readable for their owner only."""
    for file in files:
        fresh = file.with_name(f".{file.name}.mode")
        fresh.touch()  # gets the mode from the umask and the folder's default access control list
        try:
            file.chmod(stat.S_IMODE(fresh.stat().st_mode))
        finally:
            fresh.unlink()
