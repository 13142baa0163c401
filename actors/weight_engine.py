"""vLLM's side of a weight update: the plug-in that runs inside the engine's processes.

``register`` is the ``vllm.general_plugins`` entry point; vLLM calls it in every process of an engine.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from actors.lifeline import die_with_parent, die_with_starter
from actors.receiver import Receiver
from actors.weight_files import closing_all
from volley.weight_group import WeightGroupTerms

BACKEND = "volley"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def register() -> None:
    """Name the engine to vLLM, and let this process end with the one that started it."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightFileEngine)
        # It warns of each rotary table at each update. Weights that were not received are an error, see below.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        if parent_process() is not None:  # vLLM's engine process does not notice that the actor was killed
            die_with_parent()
            die_with_starter()


@dataclass
class Agreed(WeightTransferInitInfo):  # type: ignore[misc]
    """What is agreed on beforehand.

    Attributes:
        partial: updates may leave out whole layers, which stay as they are.
        actor: whose engine this is; with ``terms`` it joins a weight group.
        terms: fields of `WeightGroupTerms`, or nothing.
    """

    partial: bool = False
    actor: str = ""
    terms: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class WeightFiles(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Paths of safetensors files in checkpoint names, in the order they must be loaded.

    Without any, what the weight group brought for ``version``.
    """

    version: int
    paths: list[str]


class WeightFileEngine(WeightTransferEngine[Agreed, WeightFiles]):  # type: ignore[misc]
    """Loads weights from files in memory, through the model's own checkpoint loader.

    Layerwise reload gives every layer its checkpoint layout back while it loads and packs it for its kernels after.
    """

    init_info_cls = Agreed
    update_info_cls = WeightFiles

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver = Receiver(self.device)

    def init_transfer_engine(self, init_info: Agreed) -> None:
        """Join the weight group, if there is one, in the background."""
        self._partial = init_info.partial
        if init_info.terms:
            members = tuple((name, count) for name, count in init_info.terms["members"])
            terms = WeightGroupTerms(**{**init_info.terms, "members": members})
            self._receiver.join(terms, terms.ranks(init_info.actor)[self.parallel_config.rank])

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._missing = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WeightFiles) -> None:
        with closing_all() as received:
            if not update_info.paths:
                received += self._receiver.take(update_info.version)
            for path in update_info.paths or [file.path for file in received]:
                self._missing -= self.model.load_weights(_tensors(path))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._partial:
            self._missing = _half_loaded(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        if self._missing:
            raise ValueError(f"not all weights were published: {', '.join(sorted(self._missing)[:5])}")

    def shutdown(self) -> None:
        """Drop what was received and not loaded."""
        self._receiver.close()


def _half_loaded(model: torch.nn.Module) -> set[str]:
    """Layers that got some of their weights and not all: what they lack is gone."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        name
        for name, layer in model.named_modules()
        if (info := get_layerwise_info(layer)).can_load() and 0 < info.load_numel < info.load_numel_total
    }


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding loads nothing itself, and on CPU multiplies with a packed copy: make it anew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {layer.weight.data_ptr() for layer in layers if not isinstance(layer, ParallelLMHead)}
    for head in layers:
        if isinstance(head, ParallelLMHead) and head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file by name, where they lie in its memory."""
    file = np.memmap(path, dtype=np.uint8, mode="c")
    start = 8 + int.from_bytes(file[:8].tobytes(), "little")
    body = torch.from_numpy(file)[start:]
    for name, about in json.loads(file[8:start].tobytes()).items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            yield name, body[begin:end].view(DTYPES[about["dtype"]]).view(about["shape"])


class ServedWeights:
    """Mixed into vLLM's worker: the weights the model computes with, changed and read back in checkpoint names."""

    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any
    model_runner: Any
    model_config: Any
    device: torch.device

    def clock(self) -> float:
        """`time.monotonic` between two of the engine's steps."""
        return time.monotonic()

    def change_weights(self, version: int, paths: list[str]) -> float:
        """A whole update in one call, see `WeightFiles`; seconds."""
        begun = time.monotonic()
        self.start_weight_update()
        self.update_weights({"version": version, "paths": paths})
        self.finish_weight_update()
        return time.monotonic() - begun

    def save_served_weights(self, path: str) -> None:
        """Write them to ``path`` as a safetensors file."""
        units = torch.get_default_dtype()
        torch.set_default_dtype(self.model_config.dtype)
        try:
            Path(path).write_bytes(save(served_weights(self.model_runner.get_model(), self.device)))
        finally:
            torch.set_default_dtype(units)


@torch.inference_mode()
def served_weights(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """What each layer of ``model`` computes with, by checkpoint name; units of the default dtype are fed to it.

    A kernel may keep its matrix packed in a form nobody can read and leave the parameter empty. Its product with a
    unit vector has one non-zero term, so it is the matrix's column to the bit. For unsharded, unquantised models.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, torch.Tensor] = {}
    for path, layer in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        parts = [f"{parent}.{part}" if parent else part for part in packed.get(leaf, [leaf])]
        sizes = list(getattr(layer, "output_sizes", ())) if len(parts) > 1 else None
        for name, tensor in _tensors_of(layer, device):
            pieces = (tensor,) if sizes is None else torch.split(tensor, sizes)
            found |= {f"{part}.{name}": piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
    return found


def _tensors_of(layer: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    multiplies = isinstance(layer, LinearBase | ParallelLMHead)
    for name, parameter in layer.named_parameters(recurse=False):
        if name == "weight" and multiplies:
            product = layer.quant_method.apply(layer, torch.eye(_width(layer), device=device), None).T
            yield name, product[: layer.org_vocab_size] if isinstance(layer, ParallelLMHead) else product
        elif name == "weight" and isinstance(layer, VocabParallelEmbedding):
            yield name, parameter[: layer.org_vocab_size].clone()
        else:
            yield name, parameter.clone()


def _width(layer: Any) -> int:
    return int(layer.embedding_dim if hasattr(layer, "embedding_dim") else layer.input_size)
