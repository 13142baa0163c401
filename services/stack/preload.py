"""Imports what actors, engines and learner ranks without GPUs need, in the server that forks them, by name."""

import gc
import importlib
import os

from actors.uncompiled import uncompiled
from volley.imports import without

MODULES = (
    "actors.preload",  # the engine's
    "actors.engine",
    "actors.gateway.served",
    "learner.libraries",
    "learner.rank_worker",
)

os.environ["DS_ACCELERATOR"] = "cpu"
with uncompiled(), without("ray"):  # as `actors.preload` says
    for _module in MODULES:
        importlib.import_module(_module)
gc.collect()
gc.freeze()
