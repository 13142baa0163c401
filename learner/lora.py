"""Adapters in the learner: PEFT adds them to the model; they are published alone and merged for export.

Only adapters have ``requires_grad``, so gradients, the optimiser and checkpoints cover nothing else.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from volley.errors import JobError
from volley.lora import DOWN, UP, LoraSpec, merged
from volley.model import ModelSpec

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ADAPTER = "default"  # PEFT's name for a model's only adapter
FOLDER = "adapter"  # subfolder of an exported model
BASE = ".base_layer"  # PEFT appends this to the name of an adapted matrix


def add_adapters(lm: "PreTrainedModel", model: ModelSpec, spec: LoraSpec, seed: int) -> "PreTrainedModel":
    """Add adapters to ``lm`` that change nothing yet (B is 0), and freeze the rest; returns ``lm``.

    Args:
        model: the model that ``lm`` was loaded from.
        seed: initialises A, so that all ranks have the same.

    Raises:
        JobError: ``target_modules`` matches nothing, or something that cannot have an adapter.
    """
    from peft import inject_adapter_in_model

    ends = {name.rpartition(".")[2] for name, each in lm.named_modules() if isinstance(each, nn.Linear)} - {"lm_head"}
    advice = (
        f"write target_modules: [{', '.join(sorted(ends))}]" if ends else "it has no linear layers: drop model.lora"
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.simplefilter("ignore")  # warnings about layers that `_check` rejects
        try:
            inject_adapter_in_model(_peft_config(model, spec), lm, ADAPTER)
        except ValueError as error:
            raise JobError(f"model.lora: {' '.join(str(error).split())[:300]}; {advice}") from error
    _check(lm, model.folder, advice)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(_plain(name).endswith((DOWN, UP)))
        if parameter.requires_grad:  # PEFT uses float32 even in a bfloat16 model, which DeepSpeed would not keep
            parameter.data = parameter.data.to(getattr(torch, model.dtype))
    # ZeRO-3 considers a block's backward pass finished when its input gets a gradient. Without one, it would do so at
    # the start of the pass.
    lm.enable_input_require_grads()
    return lm


def published(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that training changes, under the names that actors expect; `volley.lora` defines an adapter's."""
    for name, parameter in lm.named_parameters():
        if parameter.requires_grad:
            yield _plain(name), parameter


@contextmanager
def without_adapters(lm: nn.Module) -> Iterator[None]:
    """Within the block, ``lm`` computes what the frozen model would.

    The adapters are still computed, with scale 0, so that ZeRO-3 sees the same layers in the same order.
    """
    layers = list(adapted(lm).values())
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def adapted(lm: nn.Module) -> "dict[str, LoraLayer]":
    """PEFT's layers, by the name of the matrix they adapt."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in lm.named_modules() if isinstance(layer, BaseTunerLayer)}


def split(state: Mapping[str, Tensor], spec: LoraSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a model's parameters, under PEFT's names, into those of the merged model and those of the adapters."""
    named = {_plain(name): tensor for name, tensor in state.items()}
    adapters = {name: tensor for name, tensor in named.items() if name.endswith((DOWN, UP))}
    whole = {}
    for name in named.keys() - adapters.keys():
        module, has_adapter, leaf = name.partition(f"{BASE}.")
        if has_adapter and leaf == "weight":
            whole[f"{module}.weight"] = merged(named[name], adapters[module + DOWN], adapters[module + UP], spec.scale)
        else:
            whole[f"{module}.{leaf}" if has_adapter else name] = named[name]
    return whole, adapters


def write_adapters(adapters: Mapping[str, Tensor], model: ModelSpec, spec: LoraSpec, folder: Path) -> None:
    """Write ``folder`` in PEFT's format, which ``PeftModel.from_pretrained(base, folder)`` loads."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = _peft_config(model, spec)
    config.inference_mode = True
    config.target_modules = sorted(name.removesuffix(DOWN) for name in adapters if name.endswith(DOWN))
    config.save_pretrained(folder)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _plain(name: str) -> str:
    """A parameter's name as in PEFT's files, that is without the adapter's name."""
    return re.sub(rf"\.(lora_[AB])\.{ADAPTER}\.", r".\1.", name)


def _peft_config(model: ModelSpec, spec: LoraSpec) -> "LoraConfig":
    from peft import LoraConfig

    targets = spec.target_modules
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        base_model_name_or_path=str(model.folder),
        task_type="CAUSAL_LM",
    )


def _check(lm: "PreTrainedModel", path: Path, advice: str) -> None:
    """Raise `JobError` for adapters that would not affect the log-probs, or not the actors."""
    layers = adapted(lm)
    head = lm.get_output_embeddings()
    odd = [name for name, layer in layers.items() if not isinstance(layer.get_base_layer(), nn.Linear)]
    odd += [name for name, layer in layers.items() if layer is head]
    if odd:
        raise JobError(f"model.lora: {odd[0]} cannot have an adapter: it is not a linear layer of a block; {advice}")
    unknown = sorted({f"{name}.weight" for name in layers} - _tensor_names(path))
    if unknown:
        raise JobError(
            f"model.lora: {path} has no tensor {unknown[0]} for actors to add the adapter to: load the model with "
            "transformers, save it with save_pretrained, and train that"
        )


def _tensor_names(path: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names
