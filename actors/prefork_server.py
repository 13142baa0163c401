"""A server that has vLLM imported and forks processes for all actors of a machine, so that they start sooner.

An actor finds it by `volley.forking.VARIABLE`, which Ray's workers inherit, if both import the same code in the same
environment.
"""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from actors.environment import engine_environment
from volley.forking import VARIABLE, server_of_this_code, this_code
from volley.job import ActorsSpec
from volley.scratch import scratch_folder

# Variables that libraries read while they are loaded; the others are set in the forked process.
_READ_AT_IMPORT = ("CUDA_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "TORCH_", "VLLM_")
_PER_ACTOR = "VLLM_RPC_BASE_PATH"
_SERVE = """
import sys
sys.stdin.read()
from multiprocessing.forkserver import main
main({listener}, {alive}, {preload}, sys_path={path})
"""
_LONGEST_ADDRESS = 107  # bytes, of a Unix socket


@contextlib.contextmanager
def shared_server(spec: ActorsSpec, preload: Sequence[str], *, delayed: bool = False) -> Iterator[Callable[[], None]]:
    """Serve what processes started within the block start on this machine.

    Does nothing for actors on GPUs, whose engines are not forked, and within a block of this process or a parent of it.

    Args:
        preload: modules that the server imports.
        delayed: import them only when the yielded function is called; until then, those that ask the server wait.
    """
    if spec.gpus or VARIABLE in os.environ:
        yield _nothing
        return
    with scratch_folder("prefork") as folder, contextlib.ExitStack() as stack:
        address = folder / _name(spec)
        if len(os.fsencode(address)) > _LONGEST_ADDRESS:
            yield _nothing
            return
        begin = stack.enter_context(_serving(address, spec, preload))
        if not delayed:
            begin()
        os.environ[VARIABLE] = str(address)
        stack.callback(os.environ.pop, VARIABLE)
        yield begin


def _nothing() -> None:
    """Begin nothing: there is no server."""


def shared_address(spec: ActorsSpec) -> str | None:
    """The socket of the shared server whose imports suit an engine of this process, if there is one."""
    address = server_of_this_code()
    return address if address and Path(address).name == _name(spec) else None


def _name(spec: ActorsSpec) -> str:
    """A name for all on which imports depend: the interpreter, this code, and the environment."""
    environment = os.environ | engine_environment(spec)
    read = {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)} | {_PER_ACTOR: ""}
    return f"{this_code()}-{hashlib.sha256(repr(sorted(read.items())).encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def _serving(address: Path, spec: ActorsSpec, preload: Sequence[str]) -> Iterator[Callable[[], None]]:
    with socket.socket(socket.AF_UNIX) as listener, (address.parent / "log").open("wb") as log:
        listener.bind(str(address))
        listener.listen()
        # The server ends when nothing holds the other end of this pipe, which it does not pass on.
        alive, held = os.pipe()
        command = _SERVE.format(listener=listener.fileno(), alive=alive, preload=list(preload), path=sys.path)
        try:
            server = subprocess.Popen(
                [sys.executable, "-c", command],
                env=os.environ | engine_environment(spec),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(), alive),
                start_new_session=True,  # signals to this process's group are not meant for engines
            )
        finally:
            os.close(alive)
    assert server.stdin is not None  # a pipe
    try:
        yield server.stdin.close
    finally:
        server.stdin.close()
        os.close(held)
        server.kill()
        server.wait()
