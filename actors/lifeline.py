"""Ends a process with the one that started it, however that one ends. Linux only, like the sandbox."""

import os
import threading
from multiprocessing import connection, parent_process
from signal import SIGKILL


def die_with_starter() -> None:
    """End with the process that started this one through ``multiprocessing``, which need not be its parent."""
    starter = parent_process()
    if starter is None:
        return

    def watch() -> None:
        connection.wait([starter.sentinel])
        os.kill(os.getpid(), SIGKILL)

    threading.Thread(target=watch, name="die-with-starter", daemon=True).start()
