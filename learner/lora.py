"""Adapters in the learner: put into the model by PEFT, published by themselves, merged for export.

Only adapters have ``requires_grad``: gradients, the optimiser and checkpoints leave out the rest of the model.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from volley.errors import JobError
from volley.job import ModelSpec
from volley.lora import DOWN, UP, LoraSpec, merged

ADAPTER = "default"  # PEFT's name for a model's only adapter
FOLDER = "adapter"  # within an exported model
BASE = ".base_layer"  # PEFT keeps the adapted matrix under its old name and this


def add_adapters(lm: Any, model: ModelSpec, spec: LoraSpec, seed: int) -> Any:
    """Give ``lm`` adapters that change nothing yet (B is 0), and freeze the rest; returns ``lm``.

    Args:
        model: what ``lm`` was loaded from.
        seed: of A, so that every rank has the same.

    Raises:
        JobError: ``target_modules`` names nothing, or something that can have no adapter.
    """
    from peft import inject_adapter_in_model

    ends = {name.rpartition(".")[2] for name, each in lm.named_modules() if isinstance(each, nn.Linear)} - {"lm_head"}
    instead = f"write target_modules: [{', '.join(sorted(ends))}]" if ends else "this model has none: drop model.lora"
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.simplefilter("ignore")  # they are of layers that are refused below
        try:
            inject_adapter_in_model(_peft_config(model, spec), lm, ADAPTER)
        except ValueError as error:
            raise JobError(f"model.lora: {' '.join(str(error).split())[:300]}; {instead}") from error
    _check(lm, model.path, instead)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(_plain(name).endswith((DOWN, UP)))
        if parameter.requires_grad:  # PEFT takes float32 beside bfloat16, which DeepSpeed would not keep
            parameter.data = parameter.data.to(getattr(torch, model.dtype))
    # ZeRO-3 takes a block's backward pass for ended once its input has a gradient, and else at its very begin.
    lm.enable_input_require_grads()
    return lm


def published(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that training changes, by the names actors know: of adapters, as `volley.lora` says."""
    for name, parameter in lm.named_parameters():
        if parameter.requires_grad:
            yield _plain(name), parameter


@contextmanager
def without_adapters(lm: nn.Module) -> Iterator[None]:
    """Within, ``lm`` computes as the frozen model does.

    The adapters stay in the computation and count nothing, so that ZeRO-3 meets the same layers in the same order.
    """
    layers = list(adapted(lm).values())
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def adapted(lm: nn.Module) -> dict[str, Any]:
    """PEFT's layers by the names of the matrices they adapt."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in lm.named_modules() if isinstance(layer, BaseTunerLayer)}


def split(state: Mapping[str, Tensor], spec: LoraSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's whole parameters, by PEFT's names, as those of the merged model and those of the adapters alone."""
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
    """Write ``folder`` in PEFT's format: ``PeftModel.from_pretrained(base, folder)`` takes it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = _peft_config(model, spec)
    config.inference_mode = True
    config.target_modules = sorted(name.removesuffix(DOWN) for name in adapters if name.endswith(DOWN))
    config.save_pretrained(folder)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _plain(name: str) -> str:
    """The name of a parameter without that of the adapter, as it is in PEFT's files."""
    return re.sub(rf"\.(lora_[AB])\.{ADAPTER}\.", r".\1.", name)


def _peft_config(model: ModelSpec, spec: LoraSpec) -> Any:
    from peft import LoraConfig

    targets = spec.target_modules
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        base_model_name_or_path=str(model.path),
        task_type="CAUSAL_LM",
    )


def _check(lm: Any, path: Path, instead: str) -> None:
    """Raise `JobError` for adapters that the log-probs, or the actors, would not see."""
    layers = adapted(lm)
    head = lm.get_output_embeddings()
    odd = [name for name, layer in layers.items() if not isinstance(layer.get_base_layer(), nn.Linear)]
    odd += [name for name, layer in layers.items() if layer is head]
    if odd:
        raise JobError(f"model.lora: {odd[0]} can have no adapter, it is no linear layer of a block; {instead}")
    unknown = sorted({f"{name}.weight" for name in layers} - _tensor_names(path))
    if unknown:
        raise JobError(
            f"model.lora: {path} has no tensor {unknown[0]}, to which actors would add the adapter: load the model "
            "with transformers, save_pretrained it, and train that"
        )


def _tensor_names(path: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names
