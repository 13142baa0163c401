"""Merges adapters into the model's own matrices while the engine generates.

The engine then loads full matrices as in any update. It computes one matmul per matrix, with exactly the weights that
`volley export` writes, on every backend of vLLM, and a new version does not depend on the previous one.
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
from volley.lora import DOWN, UP, merged
from volley.model import ModelSpec


class Merger:
    """Adds adapters to the matrices of the model on disk."""

    def __init__(self, model: ModelSpec) -> None:
        if model.lora is None:
            raise ValueError("the model has no adapters to merge")
        self._scale, self._dtype = model.lora.scale, getattr(torch, model.dtype)
        self._files = {name: file for file in sorted(model.folder.glob("*.safetensors")) for name in _names(file)}

    def full_matrices(self, adapters: Sequence[str]) -> Iterator[NDArray[np.uint8]]:
        """The adapted matrices and all others of the same blocks, as one safetensors file in memory per block.

        An engine may fuse several matrices of a block, such as q, k and v, and must then load all of them.

        Args:
            adapters: paths of the safetensors files with all adapters of a version.

        Raises:
            JobError: an adapter belongs to a matrix that the model does not have.
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
    """``model.layers.0.mlp`` for ``model.layers.0.mlp.up_proj.weight``; engines fuse matrices only within a block."""
    return name.rsplit(".", 2)[0]


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - `file` is not a mapping
            yield name, file.get_tensor(name)
