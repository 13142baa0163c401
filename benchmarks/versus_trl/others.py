"""How much of the machine other processes took while a benchmark ran: a figure to believe or to doubt it by."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

LOOK_SECONDS = 0.5


def run_beside_others(command: Sequence[str], output: Path, seconds: float) -> tuple[int, float]:
    """Run ``command``; its exit code, and the share of the machine's processor time that was not its or its children's.

    Args:
        output: its standard output and error go there.
        seconds: after which it is killed.
    """
    before, begun = _busy(), time.monotonic()
    own: dict[int, float] = {}
    with output.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        while process.poll() is None:
            own |= _processor_seconds(process.pid)
            if time.monotonic() > begun + seconds:
                process.kill()
            time.sleep(LOOK_SECONDS)
    others = _busy() - before - sum(own.values())
    return process.returncode, max(0.0, others / ((time.monotonic() - begun) * (os.cpu_count() or 1)))


def _busy() -> float:
    """Processor seconds the machine has worked."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def _processor_seconds(pid: int) -> dict[int, float]:
    """By process, of ``pid`` and all below it."""
    found: dict[int, float] = {}
    try:
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    except psutil.Error:
        pass  # one has just ended; the next look finds the others
    return found
