"""The judge: alone owns expected outputs, comparison and verdicts. Nothing of it ever enters the sandbox."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reward_servers.sandbox.outcome import Outcome
from reward_servers.sandbox.slot import SandboxFailure, Slot
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits

log = logging.getLogger(__name__)

ATTEMPTS = 2  # sandboxes one program may cost
UNSTEADY = 0.5  # a wall-clock timeout with this share of its processor time used may be the host's fault


@dataclass(frozen=True, slots=True)
class Case:
    """One test: what the program reads, and what is said of what it wrote.

    Attributes:
        stdin: bytes on standard input.
        check: standard output -> None where it is right, else one line that says what is wrong.
    """

    stdin: bytes
    check: Callable[[bytes], str | None]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What the tests said of one program.

    Attributes:
        status: passed, or what happened in the first test that failed; infra_error where the sandbox failed.
        passed: tests passed.
        failing_test: index of the first test that failed.
        last: the run of that test, or of the last one.
        cpu_ms, wall_ms, peak_mb: the largest of all tests run.
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
    """Run ``tests`` on ``source`` in order, up to the first failure or all of them. Never raises on their account."""
    if len(source) > limits.code_kb << 10:
        return _unrun(VerdictStatus.COMPILE_ERROR, f"the program is longer than {limits.code_kb} kB")
    failure = ""
    for _ in range(ATTEMPTS):
        try:
            return _run_all(slot, source, tests, limits, stop_early=stop_early)
        except SandboxFailure as problem:
            failure = f"sandbox of slot {slot.index}: {problem}"
            log.warning("%s; replaced", failure)
    return _unrun(VerdictStatus.INFRA_ERROR, failure)


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
            outcome = _run_steadily(run, test.stdin, limits)
            outcomes.append(outcome)
            status, detail = _status(outcome, test)
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


def _run_steadily(run: Callable[[bytes], Outcome], stdin: bytes, limits: SandboxLimits) -> Outcome:
    """Run once more what was stopped by the wall clock while it was using its processor time."""
    outcome = run(stdin)
    if limits.wall_limit_s is not None:  # asked for: whoever wants an answer by then does not want it twice as late
        return outcome
    if outcome.failure is VerdictStatus.TIMEOUT and UNSTEADY * limits.cpu_s <= outcome.cpu_ms / 1e3 < limits.cpu_s:
        return run(stdin)
    return outcome


def _status(outcome: Outcome, test: Case) -> tuple[VerdictStatus, str]:
    if outcome.failure is not None:
        return outcome.failure, outcome.detail
    wrong = test.check(outcome.stdout)
    return (VerdictStatus.PASSED, "") if wrong is None else (VerdictStatus.WRONG_ANSWER, wrong)


def same_tokens(expected: bytes, tolerance: float | None = None) -> Callable[[bytes], str | None]:
    """Compare white-space separated words; with a tolerance, words that are numbers compare as numbers."""
    wanted = expected.split()

    def check(stdout: bytes) -> str | None:
        if b"\0" in stdout:
            return "the output holds NUL bytes"
        got = stdout.split()
        if got == wanted:
            return None
        if len(got) != len(wanted):
            return f"{len(got)} words instead of {len(wanted)}"
        for at, (one, other) in enumerate(zip(got, wanted, strict=True)):
            if one != other and not (tolerance is not None and _near(one, other, tolerance)):
                return f"word {at} is {_show(one)} instead of {_show(other)}"
        return None

    return check


def _near(got: bytes, wanted: bytes, tolerance: float) -> bool:
    """Within ``tolerance`` of each other, absolutely or relative to what is wanted."""
    try:
        one, other = float(got), float(wanted)
    except ValueError:
        return False
    return abs(one - other) <= tolerance * max(1.0, abs(other))


def _show(word: bytes) -> str:
    return repr(word[:40].decode("utf-8", "backslashreplace"))
