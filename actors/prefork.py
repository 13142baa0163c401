"""Forks the engine's process from a server process that imports vLLM while the actor's process does the same.

Inside a Ray actor, vLLM would spawn the engine's process, which would import everything a second time, after the actor.
The actor itself cannot be forked: Ray workers run threads, and a child would keep a dead worker's connections open.
"""

import multiprocessing
import os
from multiprocessing import context, forkserver


class _Process(context.ForkServerProcess):
    """Copies the environment of the process that starts it, instead of that of the fork server."""

    _environment: dict[str, str]

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def begin() -> None:
    """Start the server process, which begins to import. The environment must be complete."""
    multiprocessing.set_forkserver_preload(["actors.preload"])
    forkserver.ensure_running()


def use() -> None:
    """Let vLLM start its engine from that server."""
    from vllm.v1.engine import utils

    utils.get_mp_context = _Context
