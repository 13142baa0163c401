"""The exit codes of processes that a server has forked."""

import os
import threading
import time
from multiprocessing import connection
from signal import SIGKILL
from typing import Any

from volley.forking import Context


def exit_codes(process: Any, threads: int) -> list[int]:
    """Kill the process; returns the exit code that each of the threads gets, which all ask as soon as it has ended."""
    codes: list[int] = []

    def ask() -> None:
        connection.wait([process.sentinel])
        while (code := process.exitcode) is None:
            pass
        codes.append(code)

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(threads)]
    for thread in asking:
        thread.start()
    os.kill(process.pid, SIGKILL)
    for thread in asking:
        thread.join(60)
    return codes


def test_all_threads_learn_the_same_exit_code() -> None:
    for _ in range(60):
        process = Context().Process(target=time.sleep, args=(600,))
        process.start()
        assert exit_codes(process, 6) == [-SIGKILL] * 6
        assert process.exitcode == -SIGKILL


def test_a_thread_that_waits_for_the_end_does_not_keep_another_from_asking() -> None:
    process = Context().Process(target=time.sleep, args=(600,))
    process.start()
    waiting = threading.Thread(target=process.join)
    waiting.start()
    time.sleep(0.1)
    assert process.exitcode is None
    process.kill()
    waiting.join(60)
    assert process.exitcode == -SIGKILL
