"""Helpers for processes: where their output goes, whether they are alive, and when the kernel ends them. Linux only."""

import contextlib
import ctypes
import fcntl
import os
import select
import sys
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path
from signal import SIGKILL, Signals
from typing import TextIO

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here because `die_with_parent` may run between fork and exec
_PR_SET_PDEATHSIG = 1
_BYTES_PER_LINE = 1024


def redirect_output(log: Path) -> None:
    """Append this process's output to ``log``, including that of native libraries and of child processes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def take_stdout() -> TextIO:
    """Return standard output, line-buffered, for replies; whatever is printed from now on goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Within the block, what this process, its libraries and its children print goes to standard error."""
    stdout = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        stdout.flush()  # what a logger, for example, has written to it
        os.dup2(kept, 1)
        os.close(kept)


def last_lines(log: Path, count: int = 20) -> str:
    """Return the last ``count`` lines of ``log``, or "" if it cannot be read (it may be on another node).

    Only the last ``count`` KiB are read, so very long lines are cut.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES_PER_LINE * count))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])


def die_with_parent(signal: Signals = SIGKILL) -> None:
    """Have the kernel send ``signal`` to this process when its parent dies, even if this process is stopped.

    Raises:
        OSError: the kernel refuses.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def die_with_starter() -> None:
    """End with the process that started this one through ``multiprocessing``, which need not be its parent.

    The kernel sends the signal when the starter's end of a pipe is closed, so it ends a process that is stopped, too.
    """
    starter = parent_process()
    if starter is None:
        return
    pipe = starter.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETSIG, SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was closed before
        os.kill(os.getpid(), SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether process ``pid`` runs on this machine. A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def death_cause(notice: str, most: int = 400) -> str:
    """Why an actor's process ended, in a line. ``notice`` is Ray's, which first repeats the actor's identifiers."""
    line = " ".join(notice.split())
    _, found, cause = line.rpartition("The actor is dead because ")
    return (cause if found else line)[:most]
