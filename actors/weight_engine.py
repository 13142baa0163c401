"""vLLM's side of a weight update: a vLLM plug-in that runs in the engine's processes.

``register`` is the ``vllm.general_plugins`` entry point, which vLLM calls in every process of an engine.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from actors.kv_memory import give_back, provide_on_first_use
from actors.receiver import Receiver
from actors.served_weights import served_weights
from volley.gpu_handles import opened
from volley.processes import die_with_parent, die_with_starter
from volley.weight_group import WeightGroupTerms

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig, WeightTransferConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

BACKEND = "volley"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def register() -> None:
    """Register the weight engine with vLLM; in an engine's process, also prepare what must precede its start."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightFileEngine)
        # This logger warns about every rotary table at each update. Missing weights are an error, see below.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        if parent_process() is not None:  # vLLM's engine process does not notice when the actor is killed
            die_with_parent()
            die_with_starter()
            if current_platform.is_cpu():
                torch.cpu._init_amx()  # Linux grants AMX tiles on request; vLLM's attention uses them unasked: SIGILL
                provide_on_first_use()


@dataclass
class WeightSetup(WeightTransferInitInfo):  # type: ignore[misc]
    """Settings for the updates to come.

    Attributes:
        partial: updates may leave out layers, which then keep their weights.
        actor: name of the engine's actor, for joining a weight group.
        terms: fields of the group's `WeightGroupTerms`; empty to join none.
    """

    partial: bool = False
    actor: str = ""
    terms: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class WeightFiles(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Paths of safetensors files with checkpoint names, in the order they must be loaded.

    Without paths, the files of ``version`` that the weight group brought.
    """

    version: int
    paths: list[str]


class WeightFileEngine(WeightTransferEngine[WeightSetup, WeightFiles]):  # type: ignore[misc]
    """Loads weights from files in memory through the model's own checkpoint loader.

    vLLM's layerwise reload restores the checkpoint layout of a layer while it loads, and then packs it for its kernels.
    """

    init_info_cls = WeightSetup
    update_info_cls = WeightFiles

    def __init__(
        self,
        config: "WeightTransferConfig",
        vllm_config: "VllmConfig",
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = Receiver(device)
        self._partial = False
        self._missing: set[str] = set()  # during an update, parameters not loaded yet

    def init_transfer_engine(self, init_info: WeightSetup) -> None:
        """Join the weight group, if there is one, in the background."""
        self._partial = init_info.partial
        if init_info.terms:
            members = tuple((name, count) for name, count in init_info.terms["members"])
            terms = WeightGroupTerms(**{**init_info.terms, "members": members})
            self._receiver.join(terms, terms.ranks(init_info.actor)[self.parallel_config.rank])

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        served = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        # What a checkpoint holds: not the scales that vLLM's own quantisation adds, nor a tied tensor twice.
        self._missing = served & {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        _rebuild_cpu_experts(self.model)

    def receive_weights(self, update_info: WeightFiles) -> None:
        if update_info.paths:
            files = (torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c")) for path in update_info.paths)
            for file in files:
                self._missing -= self.model.load_weights(_tensors(file, self.device))
            self._copied()
            return
        received = self._receiver.take(update_info.version)
        while received:  # the memory of each is free before the next is loaded
            self._missing -= self.model.load_weights(_tensors(received[0], self.device))
            self._copied()
            del received[0]

    def _copied(self) -> None:
        """Wait until the device has read what it loads."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._partial:
            self._missing = _half_loaded(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        if self._missing:
            raise ValueError(f"weights are missing from the update: {', '.join(sorted(self._missing)[:5])}")

    def shutdown(self) -> None:
        """Drop versions that were received but not loaded."""
        self._receiver.close()


def _half_loaded(model: torch.nn.Module) -> set[str]:
    """Layers that received only some of their weights; their other weights are lost."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        name
        for name, layer in model.named_modules()
        if (info := get_layerwise_info(layer)).can_load() and 0 < info.load_numel < info.load_numel_total
    }


def _rebuild_cpu_experts(model: torch.nn.Module) -> None:
    """Let experts on CPU pack the weights that follow: vLLM packs only when it builds their kernel, so drop the kernel.

    Elsewhere the kernel stays, since CUDA graphs hold its addresses and vLLM converts the weights in place.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
            method.moe_kernel = None


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack output heads that are tied to the embedding: they load nothing, and on CPU they use a packed copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {layer.weight.data_ptr() for layer in layers if not isinstance(layer, ParallelLMHead)}
    for head in layers:
        if isinstance(head, ParallelLMHead) and head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)


def _tensors(file: torch.Tensor, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, uint8 [bytes] on any device, by name, as views into its memory.

    Args:
        device: where those are whose header has `volley.gpu_handles` in place of a content.
    """
    start = 8 + int.from_bytes(file[:8].cpu().numpy().tobytes(), "little")
    header, body = file[8:start].cpu().numpy().tobytes(), file[start:]
    for name, about in json.loads(header).items():
        if name == "__metadata__":
            continue
        if "memory" in about:
            yield name, opened(about, device)
        else:
            begin, end = about["data_offsets"]
            yield name, body[begin:end].view(DTYPES[about["dtype"]]).view(about["shape"])


class ServedWeights:
    """Mixed into vLLM's worker: changes the weights the model computes with, and reads them back."""

    if TYPE_CHECKING:  # what vLLM's worker has
        model_runner: GPUModelRunner
        model_config: ModelConfig
        device: torch.device

        def start_weight_update(self) -> None: ...
        def update_weights(self, update_info: dict[str, object]) -> None: ...
        def finish_weight_update(self) -> None: ...
        def sleep(self, level: int) -> None: ...
        def wake_up(self, tags: list[str]) -> None: ...

    def clock(self) -> float:
        """`time.monotonic` of the worker, read between two of the engine's steps."""
        return time.monotonic()

    def change_weights(self, version: int, paths: list[str]) -> float:
        """Make a whole update, see `WeightFiles`; returns the seconds it took."""
        begun = time.monotonic()
        self.start_weight_update()
        self.update_weights({"version": version, "paths": paths})
        self.finish_weight_update()
        return time.monotonic() - begun

    def give_memory_back(self) -> None:
        """Give back the cache and, on a GPU, the weights, which the host's memory keeps."""
        if self.device.type == "cpu":
            give_back()
        else:
            self.sleep(1)

    def take_memory_again(self, tags: Sequence[str]) -> None:
        """Undo `give_memory_back` for ``tags``, of "weights" and "kv_cache"; the cache is empty."""
        if self.device.type != "cpu":
            self.wake_up(list(tags))

    def save_served_weights(self, path: str) -> None:
        """Write `served_weights` to ``path`` as a safetensors file. Every worker takes part; the first one writes."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.model_config.dtype)
        try:
            served = served_weights(self.model_runner.get_model(), self.device)
        finally:
            torch.set_default_dtype(default)
        if get_tensor_model_parallel_rank() == 0:
            Path(path).write_bytes(save(served))
