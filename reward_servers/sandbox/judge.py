"""The judge: holds the expected outputs, compares and gives verdicts. Nothing of this ever enters the sandbox."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reward_servers.sandbox.outcome import Outcome
from reward_servers.sandbox.slot import RunTest, SandboxFailure, Slot
from reward_servers.sandbox.time_limit import OutOfTime, tick, time_limit
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits

log = logging.getLogger(__name__)

ATTEMPTS = 2  # per program, each in another sandbox
CHECK_S, CHECK_S_PER_MB = 1.0, 1.0  # processor seconds allowed for comparing one output
UNSTEADY = 0.5  # a wall-clock timeout after this share of the CPU limit may be due to load on the host


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program.

    Attributes:
        stdin: the program's standard input.
        check: gets standard output; returns None if it is correct, else one line that says what is wrong.
    """

    stdin: bytes
    check: Callable[[bytes], str | None]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of all tests of one program.

    Attributes:
        status: passed, or the status of the first failed test; infra_error if the sandbox failed.
        passed: number of tests passed.
        failing_test: index of the first failed test; None if all passed.
        last: outcome of that test, or of the last one if all passed.
        cpu_ms, wall_ms, peak_mb: maximum over all tests run.
    """

    status: VerdictStatus
    passed: int
    failing_test: int | None
    last: Outcome | None
    detail: str = ""
    cpu_ms: float = 0.0
    wall_ms: float = 0.0
    peak_mb: float = 0.0


def judge_program(
    slot: Slot, source: bytes, tests: Sequence[Case], limits: SandboxLimits, *, stop_early: bool = True
) -> ProgramResult:
    """Run ``tests`` on ``source`` in order, until the first failure if ``stop_early``. No program can make it raise."""
    if (refused := too_long(source, limits)) is not None:
        return refused
    failure = ""
    for _ in range(ATTEMPTS):
        try:
            return _run_all(slot, source, tests, limits, stop_early=stop_early)
        except SandboxFailure as problem:
            failure = f"sandbox of slot {slot.index}: {problem}"
            log.warning("%s; replacing the sandbox", failure)
    return _unrun(VerdictStatus.INFRA_ERROR, failure)


def too_long(source: bytes, limits: SandboxLimits) -> ProgramResult | None:
    """Return the result of a program that is longer than ``code_kb``, else None."""
    if len(source) <= limits.code_kb << 10:
        return None
    return _unrun(VerdictStatus.COMPILE_ERROR, f"the program is longer than {limits.code_kb} kB")


def _unrun(status: VerdictStatus, detail: str) -> ProgramResult:
    return ProgramResult(status, 0, 0 if status.bears_reward else None, None, detail)


def _run_all(
    slot: Slot, source: bytes, tests: Sequence[Case], limits: SandboxLimits, *, stop_early: bool
) -> ProgramResult:
    deadline = time.monotonic() + limits.program_s
    outcomes: list[Outcome] = []
    failures: list[tuple[VerdictStatus, int, str, Outcome | None]] = []
    with slot.program(source, limits) as run:
        for index, test in enumerate(tests):
            if time.monotonic() > deadline:
                failures.append((VerdictStatus.TIMEOUT, index, f"all tests took over {limits.program_s:g} s", None))
                break
            outcome = _run_steadily(run, test.stdin, limits, deadline)
            outcomes.append(outcome)
            status, detail = verdict_of(outcome, test)
            if status is VerdictStatus.TIMEOUT and time.monotonic() > deadline:
                detail = f"all tests took over {limits.program_s:g} s"
            if status is not VerdictStatus.PASSED:
                failures.append((status, index, detail, outcome))
                if stop_early or status is VerdictStatus.COMPILE_ERROR:
                    break
    passed = sum(1 for _ in outcomes) - sum(1 for failure in failures if failure[3] is not None)
    status, failing, detail, last = (
        failures[0] if failures else (VerdictStatus.PASSED, None, "", outcomes[-1] if outcomes else None)
    )
    return ProgramResult(
        status,
        passed,
        failing,
        last,
        detail,
        cpu_ms=max((outcome.cpu_ms for outcome in outcomes), default=0.0),
        wall_ms=max((outcome.wall_ms for outcome in outcomes), default=0.0),
        peak_mb=max((outcome.peak_mb for outcome in outcomes), default=0.0),
    )


def _run_steadily(run: RunTest, stdin: bytes, limits: SandboxLimits, deadline: float) -> Outcome:
    """Run one test; repeat it once if it hit the wall-clock limit with over half of its CPU time used."""
    outcome = run(stdin, deadline - time.monotonic())
    if limits.wall_limit_s is not None:  # an explicit limit must not be exceeded by a second run
        return outcome
    unsteady = UNSTEADY * limits.cpu_s <= outcome.cpu_ms / 1e3 < limits.cpu_s
    if outcome.failure is VerdictStatus.TIMEOUT and unsteady and time.monotonic() < deadline:
        return run(stdin, deadline - time.monotonic())
    return outcome


def verdict_of(outcome: Outcome, test: Case) -> tuple[VerdictStatus, str]:
    """Return the status of one run and one line of detail. Never raises."""
    if outcome.failure is not None:
        return outcome.failure, outcome.detail
    try:
        with time_limit(CHECK_S + CHECK_S_PER_MB * len(outcome.stdout) / (1 << 20)):
            wrong = test.check(outcome.stdout)
    except OutOfTime:
        return VerdictStatus.TIMEOUT, "comparing its output took too long"
    except Exception as problem:  # a fault-tolerance point: the program chose the output, so the verdict is about it
        log.warning("comparing an output failed", exc_info=problem)
        return VerdictStatus.WRONG_ANSWER, f"its output cannot be compared: {type(problem).__name__}"
    return (VerdictStatus.PASSED, "") if wrong is None else (VerdictStatus.WRONG_ANSWER, wrong)


def same_tokens(expected: bytes, tolerance: float | None = None) -> Callable[[bytes], str | None]:
    """Return a check that compares words separated by white space; with ``tolerance``, numbers may differ by that."""
    wanted = expected.split()

    def check(stdout: bytes) -> str | None:
        if b"\0" in stdout:
            return "the output contains NUL bytes"
        got = stdout.split()
        if got == wanted:
            return None
        if len(got) != len(wanted):
            return f"{len(got)} words instead of {len(wanted)}"
        for at, (one, other) in enumerate(zip(got, wanted, strict=True)):
            tick()
            if one != other and not (tolerance is not None and _near(one, other, tolerance)):
                return f"word {at} is {_show(one)} instead of {_show(other)}"
        return None

    return check


def _near(got: bytes, wanted: bytes, tolerance: float) -> bool:
    """Return whether two words are numbers within ``tolerance``, absolute or relative to ``wanted``."""
    try:
        one, other = float(got), float(wanted)
    except ValueError:
        return False
    return one == other or (math.isfinite(other) and abs(one - other) <= tolerance * max(1.0, abs(other)))


def _show(word: bytes) -> str:
    return repr(word[:40].decode("utf-8", "backslashreplace"))
