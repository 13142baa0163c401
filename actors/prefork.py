"""Forks the engine's process from a server process that has imported vLLM, or does while the actor's process does.

Inside a Ray actor, vLLM would spawn the engine's process, which would import everything a second time, after the actor.
The actor itself cannot be forked: Ray workers run threads, and a child would keep a dead worker's connections open.
"""

import multiprocessing
import os
import selectors
import tempfile
from collections.abc import Sequence
from multiprocessing import context, forkserver, reduction
from pathlib import Path
from typing import Any

from actors.prefork_server import PRELOAD, shared_address
from volley.job import ActorsSpec

FORK_SECONDS = 120.0  # within which a shared server forks; it may still be importing
_OUTPUTS = (1, 2)
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class _Process(context.ForkServerProcess):
    """Inherits from the process that starts it what other children inherit from their parent, the fork server."""

    _inherited: dict[str, Any]

    def start(self) -> None:
        self._inherited = {
            "environment": dict(os.environ),
            "cores": os.sched_getaffinity(0),
            "niceness": os.nice(0),
            "oom_score": int(_OOM_SCORE.read_text()),
        }
        super().start()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_outputs": [reduction.DupFd(number) for number in _OUTPUTS]}

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._inherited["environment"])
        tempfile.tempdir = None
        os.sched_setaffinity(0, self._inherited["cores"])
        os.nice(max(0, self._inherited["niceness"] - os.nice(0)))
        if self._inherited["oom_score"] > int(_OOM_SCORE.read_text()):  # as niceness, only root may lower it
            _OOM_SCORE.write_text(str(self._inherited["oom_score"]))
        for number, output in zip(_OUTPUTS, self.__dict__.pop("_outputs"), strict=True):
            descriptor = output.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


class _SharedServer(forkserver.ForkServer):
    """Forks from a shared server; from a server of this process if that fails."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # what a child holds would keep its server alive

    def ensure_running(self) -> None:
        """Do nothing: the server's owner keeps it running."""

    def connect_to_new_process(self, fds: Sequence[int]) -> tuple[int, int]:
        try:
            status, data = super().connect_to_new_process(fds)
        except (ConnectionError, FileNotFoundError):
            return _fork_from_own(fds)
        with selectors.DefaultSelector() as selector:
            selector.register(status, selectors.EVENT_READ)
            if selector.select(FORK_SECONDS):
                return status, data
        os.close(status)
        os.close(data)
        return _fork_from_own(fds)


_fork_from_own = forkserver.connect_to_new_process


def begin(spec: ActorsSpec) -> None:
    """Find a shared server, or start one, which begins to import. The environment must be complete."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    if (address := shared_address(spec)) is None:
        forkserver.ensure_running()
    else:
        forkserver.connect_to_new_process = _SharedServer(address).connect_to_new_process


def use() -> None:
    """Let vLLM start its engine from that server."""
    from vllm.v1.engine import utils

    utils.get_mp_context = _Context
