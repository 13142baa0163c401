"""Weights out of the ZeRO-3 shards: to the actors bucket by bucket, to disk as a Hugging Face folder."""

import json
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner.lora import FOLDER, split, write_adapters
from volley.job import ModelSpec

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


def buckets(
    parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Named parameters in groups of at most ``bucket_bytes`` (at least one each)."""
    bucket: list[tuple[str, nn.Parameter]] = []
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


def full_elements(parameter: Any) -> int:
    """Elements of the whole parameter, sharded or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered(bucket: list[tuple[str, nn.Parameter]], *, keep: bool) -> dict[str, torch.Tensor]:
    """The bucket's whole tensors, on the CPU; empty on ranks with ``keep`` False. Every rank must call it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
        return {name: parameter.detach().cpu().clone() for name, parameter in bucket} if keep else {}


def gathered_views(bucket: list[tuple[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    """The bucket's whole tensors where they were gathered, not copied. Every rank must call it.

    They stay valid while they are held, and unchanged until the optimiser's next step, which changes shards in place.
    """
    import deepspeed

    if resident(bucket):  # DeepSpeed would copy some of them
        return {name: parameter.ds_tensor.detach().view(parameter.ds_shape) for name, parameter in bucket}  # type: ignore[attr-defined]
    with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
        return {name: parameter.detach() for name, parameter in bucket}


def resident(bucket: list[tuple[str, nn.Parameter]]) -> bool:
    """Are this rank's shards the whole tensors, as with one rank? Then no more memory is needed to hold them."""
    return all(_shard_size(parameter) == full_elements(parameter) for _, parameter in bucket)


def _shard_size(parameter: Any) -> int:
    return int(parameter.ds_tensor.numel()) if hasattr(parameter, "ds_tensor") else 0


def file_parts(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors, uint8 [bytes], that laid end to end are one safetensors file: its header, then one for each of these.

    A tensor that lies end to end in memory is not copied. The format: header length (uint64, little-endian), JSON
    header padded with spaces to 8 bytes, tensors end to end.

    Raises:
        KeyError: a tensor's type is not one of `DTYPES`.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # each starts aligned to its type
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return [head, *(tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in ordered)]


def export(lm: Any, model: ModelSpec, folder: Path, bucket_bytes: int, *, write: bool) -> None:
    """Write the whole model to ``folder``, as `write_model`. Every rank must call it; one of them with ``write``."""
    state: dict[str, torch.Tensor] = {}
    for bucket in buckets(lm.named_parameters(), bucket_bytes):
        state.update(gathered(bucket, keep=write))
    if write:
        write_model(lm, state, model, folder)


def write_model(lm: Any, state: Mapping[str, torch.Tensor], model: ModelSpec, folder: Path) -> None:
    """Write ``lm`` with the parameters ``state`` to ``folder`` in Hugging Face format, with the tokenizer of ``model``.

    Adapters are merged into what they adapt, and lie beside it by themselves, in PEFT's format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.lora is not None:
        state, adapters = split(state, model.lora)
        write_adapters(adapters, model, model.lora, folder / FOLDER)
    lm.save_pretrained(folder, state_dict=dict(state))
    give_usual_mode(folder.rglob("*.safetensors"))
    for name in TOKENIZER_FILES:
        if (model.path / name).exists():
            shutil.copy2(model.path / name, folder / name)


def give_usual_mode(files: Iterable[Path]) -> None:
    """Let the umask decide who may read ``files``: the safetensors library writes for their owner alone."""
    for file in files:
        fresh = file.with_name(f".{file.name}.mode")
        fresh.touch()  # the folder's default access list has its say too
        try:
            file.chmod(stat.S_IMODE(fresh.stat().st_mode))
        finally:
            fresh.unlink()
