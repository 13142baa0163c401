"""Weights out of the ZeRO-3 shards: to the actors bucket by bucket, to disk as a Hugging Face folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

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


def buckets(lm: nn.Module, bucket_bytes: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """The model's parameters by checkpoint name, in groups of at most ``bucket_bytes`` (at least one each)."""
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in lm.named_parameters():
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


def packed(tensors: dict[str, torch.Tensor]) -> NDArray[np.uint8]:
    """The tensors as one safetensors file in memory."""
    from safetensors.torch import save

    return np.frombuffer(save(tensors), dtype=np.uint8)


def export(lm: Any, source: Path, folder: Path, bucket_bytes: int, *, write: bool) -> None:
    """Write the whole model to ``folder`` in Hugging Face format, with the tokenizer of ``source``.

    Every rank must call it; one of them with ``write``.
    """
    state: dict[str, torch.Tensor] = {}
    for bucket in buckets(lm, bucket_bytes):
        state.update(gathered(bucket, keep=write))
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    lm.save_pretrained(folder, state_dict=state)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy2(source / name, folder / name)
