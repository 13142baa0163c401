"""A Ray actor that tells of its process."""

import os
import sys
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import ray


class Probe:
    """Has to be importable by the worker that it runs in."""

    def about(self) -> dict[str, Any]:
        launcher = parent_process()
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "title": Path("/proc/self/cmdline").read_text().strip("\0"),
            "environment": dict(os.environ),
            "imported": "this" in sys.modules,  # by the server alone
            "job": ray.get_runtime_context().get_job_id(),
            "launcher": launcher.pid if launcher else None,
        }

    def graphs(self) -> int:
        """How many programs torch makes of a small model whose layers are compiled."""
        import torch

        from learner.compiled import compile_layers
        from tests.unit.learner.conftest import tiny_lm

        lm = tiny_lm()
        compile_layers(lm, cuda=False)
        lm(input_ids=torch.arange(3, 20)[None])
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
