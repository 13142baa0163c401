"""No process outlives the one that started it, however that one ends. Linux only, as the sandbox is."""

import ctypes
import os
import threading
from multiprocessing import connection, parent_process
from signal import SIGKILL

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From here on the kernel kills this process when its parent dies, even while it is stopped.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def die_with_starter() -> None:
    """The same for the process that asked ``multiprocessing`` for this one, which need not be its parent."""
    starter = parent_process()
    if starter is None:
        return

    def watch() -> None:
        connection.wait([starter.sentinel])
        os.kill(os.getpid(), SIGKILL)

    threading.Thread(target=watch, name="die-with-starter", daemon=True).start()
