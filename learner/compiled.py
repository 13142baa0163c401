"""Layers compiled by torch: what a layer does between its matrix products becomes a few loops in place of many."""

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from volley.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_layers(model: "PreTrainedModel", *, cuda: bool) -> None:
    """Compile the layers of ``model`` when they are first called; lengths of rows may differ from call to call.

    Raises:
        JobError: there is no C++ compiler, which torch needs on CPUs; or the model has no layers that are units.
    """
    if not cuda and not has_compiler():
        raise JobError("learner.compile: true needs a C++ compiler on CPUs: install g++, or write compile: false")
    layers = units(model)
    if not layers:
        kind = model.config.model_type
        raise JobError(f"models of type {kind} have no layers to compile: write learner.compile: false")
    from torch._dynamo import config

    config.disable = False  # a rank may be forked from a process that also serves engines, which compile nothing
    for layer in layers:
        # The layer's own call stays as it is: around it, ZeRO gathers weights and checkpointing recomputes.
        layer.forward = torch.compile(layer.forward, dynamic=True)


def units(model: nn.Module) -> list[Any]:
    """The layers of ``model`` that must not be taken apart, which transformers names by class."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def has_compiler() -> bool:
    """Whether torch finds a C++ compiler."""
    return shutil.which(os.environ.get("CXX", "g++").partition(" ")[0]) is not None
