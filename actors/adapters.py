"""Adapters on their way into an engine: added to the model's own matrices while the engine generates.

The engine then loads whole matrices, as it does of any update: it computes with what the learner's export holds, in
one product, whatever vLLM's backend; and a new version needs nothing of the one before it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from volley.errors import JobError
from volley.job import ModelSpec
from volley.lora import DOWN, UP, merged


class Merger:
    """The model of a run as it lies on disk, and the sum of it and adapters."""

    def __init__(self, model: ModelSpec) -> None:
        if model.lora is None:
            raise ValueError("a model without adapters has nothing to merge")
        self._scale, self._dtype = model.lora.scale, getattr(torch, model.dtype)
        self._files = {name: file for file in sorted(model.path.glob("*.safetensors")) for name in _names(file)}

    def whole(self, adapters: Sequence[str]) -> Iterator[NDArray[np.uint8]]:
        """Safetensors files in memory: the adapted matrices and all that lies in the same blocks, a block a file.

        An engine may keep several matrices of a block in one (as q, k and v), and loads only all of them.

        Args:
            adapters: paths of the safetensors files that hold every adapter of a version.

        Raises:
            JobError: there is an adapter of a matrix that the model has not.
        """
        tensors = {name: tensor for path in adapters for name, tensor in _tensors(path)}
        modules = {name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
        if unknown := {f"{module}.weight" for module in modules} - self._files.keys():
            raise JobError(f"model.lora: the model's files have no {min(unknown)}")
        for block in sorted({_block(f"{module}.weight") for module in modules}):
            yield np.frombuffer(save(self._block(block, tensors)), dtype=np.uint8)

    def _block(self, block: str, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, file in self._files.items():
            if _block(name) != block:
                continue
            with safe_open(file, framework="pt") as tensors:
                base = tensors.get_tensor(name).to(self._dtype)
            module = name.removesuffix(".weight")
            down, up = adapters.get(module + DOWN), adapters.get(module + UP)
            out[name] = base if down is None or up is None else merged(base, down, up, self._scale)
        return out


def _block(name: str) -> str:
    """``model.layers.0.mlp`` of ``model.layers.0.mlp.up_proj.weight``: what an engine may fuse lies in one."""
    return name.rsplit(".", 2)[0]


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)
