"""The engine's process, forked from one that imports vLLM while the actor's process does the same.

vLLM would start it from nothing inside a Ray actor and import everything a second time, one after the other. A Ray
worker itself must not be forked: it runs threads, and a child would hold its connections open beyond its death.
"""

import multiprocessing
import os
from multiprocessing import context, forkserver
from typing import Any


class _Process(context.ForkServerProcess):
    """Carries its parent's environment along; a forked process has the one of the server's start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def begin() -> None:
    """Start importing, in another process. The environment must be complete."""
    multiprocessing.set_forkserver_preload(["actors.preload"])
    forkserver.ensure_running()


def use() -> None:
    """Let vLLM start its engine from there."""
    from vllm.v1.engine import utils

    utils.get_mp_context = _Context
