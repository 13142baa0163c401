"""Ends a process with the one that started it, however that one ends. Linux only, like the sandbox."""

import fcntl
import os
import select
from multiprocessing import parent_process
from signal import SIGKILL


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
