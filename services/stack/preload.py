"""Imports what actors, engines and learner ranks without GPUs need, in the server that forks them, by name."""

import gc
import os

from actors.uncompiled import uncompiled
from volley.imports import without

os.environ["DS_ACCELERATOR"] = "cpu"
with uncompiled(), without("ray"):
    import learner.libraries
    import learner.rank_worker  # noqa: F401

gc.collect()
gc.freeze()
