"""Classifies one run of a program by its exit status, times, counters and output."""

import signal
from dataclasses import dataclass
from typing import Any

from volley.records import VerdictStatus
from volley.scoring import SandboxLimits


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a program on one test.

    Attributes:
        failure: how it failed; None if it exited with status 0 within its limits.
        stdout, stderr: bytes, cut at the limits.
        cpu_ms: processor time in ms, including child processes.
        wall_ms: wall time in ms.
        peak_mb: largest resident memory of one process.
        detail: one line about the failure, or "".
    """

    failure: VerdictStatus | None
    stdout: bytes
    stderr: bytes
    cpu_ms: float
    wall_ms: float
    peak_mb: float
    detail: str = ""


def classify(
    answer: dict[str, Any],
    stdout: bytes,
    stderr: bytes,
    limits: SandboxLimits,
    *,
    flooded: bool,
    killed_for_memory: bool,
) -> Outcome:
    """Return the outcome of a run. Raises ValueError if the sandbox failed to confine the program."""
    if answer["setup_error"]:
        raise ValueError(f"confinement failed: {answer['setup_error']}")
    failure, detail = _failure(answer, stderr, limits, flooded=flooded, killed_for_memory=killed_for_memory)
    return Outcome(failure, stdout, stderr, answer["cpu_s"] * 1e3, answer["wall_s"] * 1e3, answer["peak_mb"], detail)


def _failure(
    answer: dict[str, Any], stderr: bytes, limits: SandboxLimits, *, flooded: bool, killed_for_memory: bool
) -> tuple[VerdictStatus | None, str]:
    code, cpu_s = int(answer["exit"]), float(answer["cpu_s"])
    if answer["compile_error"]:
        return VerdictStatus.COMPILE_ERROR, answer["compile_error"]
    if flooded:
        return VerdictStatus.OUTPUT_LIMIT, "wrote more than its output limit"
    if killed_for_memory:
        return VerdictStatus.MEMORY_LIMIT, "the kernel killed it because memory ran out"
    if answer["timed_out"]:
        return VerdictStatus.TIMEOUT, f"wall time over {limits.wall_s:g} s"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= limits.cpu_s):
        return VerdictStatus.TIMEOUT, f"processor time over {limits.cpu_s:g} s"
    if code == 0:
        late = cpu_s > limits.cpu_s
        return (VerdictStatus.TIMEOUT, f"processor time {cpu_s:.2f} s over {limits.cpu_s:g} s") if late else (None, "")
    if b"MemoryError" in stderr[-400:]:
        return VerdictStatus.MEMORY_LIMIT, "MemoryError"
    if code == -signal.SIGXFSZ:
        return VerdictStatus.OUTPUT_LIMIT, "wrote a file over the size limit"
    if code == -signal.SIGSYS:
        return VerdictStatus.SECURITY_VIOLATION, "used system calls of another architecture"
    what = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    return VerdictStatus.RUNTIME_ERROR, what
