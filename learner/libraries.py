"""Import this first in a rank's process: the libraries of a rank, without what DeepSpeed imports but no rank uses.

The environment must be complete: torch and DeepSpeed read it as they are imported.
"""

import gc
import importlib
from collections.abc import Callable
from typing import Any

from volley.imports import without, without_collection

LIBRARIES = (
    "deepspeed",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "learner.engine",
    "learner.publishing",
    "learner.reinforce",
    "learner.value",
)


def _uncompiled() -> Callable[[Any], Any]:
    return lambda function: function


def _import_muon() -> None:
    """DeepSpeed imports its Muon optimizer in any case; compiled, its functions would bring all of inductor."""
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    kept, compiler.compile = compiler.compile, _uncompiled
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = kept


with without_collection(), without("mlflow"):  # DeepSpeed's autotuner would report to it
    for _name in LIBRARIES:
        importlib.import_module(_name)
    _import_muon()
gc.freeze()  # or every full collection walks all that was imported
