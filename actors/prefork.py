"""Forks the engine's process from a server process that has imported vLLM, or does while the actor's process does.

Inside a Ray actor, vLLM would spawn the engine's process, which would import everything a second time, after the actor.
The actor's own process cannot fork it: Ray workers run threads, and a child would keep a dead worker's connections.
"""

import gc
import multiprocessing
from multiprocessing import forkserver

from actors.prefork_server import shared_address
from volley.forking import Context, Forked, fork_from
from volley.job import ActorsSpec

PRELOAD = ["actors.preload"]


def begin(spec: ActorsSpec) -> None:
    """Find a shared server, or start one, which begins to import. The environment must be complete."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    if (address := shared_address(spec)) is None:
        forkserver.ensure_running()
    else:
        fork_from(address, otherwise_own=True)


def use() -> None:
    """Let vLLM start its engine from that server."""
    from vllm.v1.engine import utils

    utils.get_mp_context = _Context


class _Engine(Forked):
    def run(self) -> None:
        import setproctitle

        setproctitle.setproctitle("volley::engine")  # the first call must precede any change of the environment
        gc.unfreeze = _nothing  # at its end, vLLM would collect all that was imported, and so copy the server's memory
        super().run()


def _nothing() -> None:
    """Leave frozen what the process shares with its server."""


class _Context(Context):
    Process = _Engine
