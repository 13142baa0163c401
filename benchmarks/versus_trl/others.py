"""Measures how much CPU time other processes took while a benchmark ran, which shows how far to trust its result."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

LOOK_SECONDS = 0.5


def run_beside_others(command: Sequence[str], output: Path, seconds: float) -> tuple[int, float]:
    """Run ``command``; returns its exit code, and the share of the machine's CPU time that other processes took.

    Args:
        output: file for its standard output and error.
        seconds: time limit after which it is killed.
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
    """CPU seconds that the machine has been busy since it booted."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def _processor_seconds(pid: int) -> dict[int, float]:
    """CPU seconds by process id, of ``pid`` and its descendants."""
    found: dict[int, float] = {}
    try:
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    except psutil.Error:
        pass  # a process has just ended; the next look finds the others
    return found
