"""Starts a process as a fork of a server that has imported what it needs, with what it would inherit from its starter.

It imports next to nothing, because the start of every such process imports it.
"""

import hashlib
import os
import runpy
import selectors
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection, context, forkserver, popen_forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from volley.processes import die_with_starter

VARIABLE = "VOLLEY_PREFORK"  # the socket of a server of this machine
FROM = "VOLLEY_FORK_FROM"  # the same, in the environment of a Ray worker that the server may fork
FORK_SECONDS = 45.0  # within which a server forks, which may still be importing; Ray gives its workers 60 to start
_OUTPUTS = (1, 2)
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def this_code() -> str:
    """Return a name for the interpreter and this code, with which a server's names begin."""
    depends = os.path.realpath(sys.prefix), os.path.realpath(__file__)
    return hashlib.sha256(repr(depends).encode()).hexdigest()[:12]


def server_of_this_code(environment: Mapping[str, str] = os.environ, name: str = VARIABLE) -> str | None:
    """Return the socket of a server that forks processes of this code, if there is one."""
    address = environment.get(name, "")
    return address if Path(address).name.startswith(this_code()) and Path(address).exists() else None


def ray_options() -> dict[str, Any]:
    """Return the options for a Ray actor that uses no GPU, so that its process is forked if this machine can."""
    address = server_of_this_code()
    return {"runtime_env": {"env_vars": {FROM: address}}} if address else {}


class _Popen(popen_forkserver.Popen):
    """Lets several threads ask for the exit code, which the base class can read from the server only once."""

    def __init__(self, process: BaseProcess) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG:
            connection.wait([self.sentinel])  # before the lock, which must not keep other threads waiting as long
        with self._reading:
            return super().poll(flag)


class Forked(context.ForkServerProcess):
    """Inherits from the process that starts it what other children inherit from their parent, the fork server.

    Its target must not be defined in a main module.
    """

    _inherited: dict[str, Any]

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:  # noqa: N802 - the base class's name
        """Start without the main module of this process, which may be slow to import and has nothing of use there."""
        kept, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            return _Popen(process)
        finally:
            sys.modules["__main__"] = kept

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
        os.setpgid(0, 0)  # Ray ends the process group of a worker that died, which would be the server's
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


class Context(context.ForkServerContext):
    """The ``multiprocessing`` context of such processes."""

    Process = Forked


class NoServer(Exception):
    """The server at an address does not fork."""


class SharedServer(forkserver.ForkServer):
    """Forks from the server at ``address``, which another process keeps running."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # what a child holds would keep its server alive

    def ensure_running(self) -> None:
        """Do nothing: the server's owner keeps it running."""

    def connect_to_new_process(self, fds: Sequence[int]) -> tuple[int, int]:
        """As in the base class. Raises `NoServer` if the server is gone or does not answer in time."""
        try:
            status, data = super().connect_to_new_process(fds)
        except OSError as error:
            raise NoServer(str(error)) from error
        with selectors.DefaultSelector() as selector:
            selector.register(status, selectors.EVENT_READ)
            if selector.select(FORK_SECONDS):
                return status, data
        os.close(status)
        os.close(data)
        raise NoServer(f"it did not answer within {FORK_SECONDS:g} s")


_fork_from_own = forkserver.connect_to_new_process


def fork_from(address: str, *, otherwise_own: bool) -> None:
    """Let the processes that this one starts in `Context` be forked from the server at ``address``.

    Args:
        otherwise_own: whether a server of this process stands in for one that does not fork; else `NoServer` is raised.
    """
    server = SharedServer(address)

    def connect(fds: Sequence[int]) -> tuple[int, int]:
        try:
            return server.connect_to_new_process(fds)
        except NoServer:
            if not otherwise_own:
                raise
            return _fork_from_own(fds)

    forkserver.connect_to_new_process = connect


def run_script(arguments: Sequence[str]) -> None:
    """Run the script ``arguments[0]`` as the main module of a forked process, which ends with its starter."""
    die_with_starter()
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")
