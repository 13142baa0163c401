"""``code``: runs the sample's program against the row's tests in the sandbox."""

import time
from collections.abc import Sequence
from dataclasses import replace

from reward_servers.sandbox.health import Sandbox, SandboxReport
from reward_servers.sandbox.judge import ProgramResult, too_long
from reward_servers.scorers.base import escaped, one_line, passed_or, row_error
from reward_servers.scorers.cases import (
    COMPILE_ERROR,
    HARNESS,
    AnyTest,
    count_cases,
    is_weak,
    make_cases,
    parse_tests,
    reads_stdin,
)
from reward_servers.scorers.extract import program_in
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import CodeScorer, SandboxLimits

SHOWN = 2000  # characters of output that a verdict includes


class Code:
    """Rewards passing all tests, or the share of passed tests. Identical programs of a group run once.

    Public tests, if the row has any, do not count in the reward: the share of them that passes is the sample's rank.
    """

    def __init__(self, spec: CodeScorer, sandbox: Sandbox | None = None) -> None:
        self._spec = spec
        self._sandbox = sandbox or Sandbox(spec.sandbox)
        self._owned = sandbox is None

    @staticmethod
    def check(spec: CodeScorer) -> None:
        """Accept every spec: the worker checks its own host."""

    @staticmethod
    def check_row(spec: CodeScorer, prompt: Prompt) -> None:
        """Raise JobError if the row's ``tests`` are missing or invalid."""
        try:
            parse_tests(prompt.reference.get("tests"))
        except ValueError as problem:
            raise row_error(prompt, f"the code scorer needs tests: {problem}", "tests") from problem

    @property
    def report(self) -> SandboxReport:
        """The report of the sandbox that programs run in."""
        return self._sandbox.report

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        tests = parse_tests(prompt.reference.get("tests"))
        weak = is_weak(tests)
        known: dict[str | None, Verdict] = {}
        for text in texts:
            source = program_in(text, self._spec.extract)
            if source not in known:
                known[source] = self._judge(source, tests, weak)
        return [known[program_in(text, self._spec.extract)] for text in texts]

    def _judge(self, source: str | None, tests: Sequence[AnyTest], weak: bool) -> Verdict:
        ranked = any(test.public for test in tests)
        if source is None:
            none = passed_or(VerdictStatus.NO_ANSWER, self._spec.values, detail="no program in the sample")
            return replace(none, rank=0.0) if ranked else none
        hidden = [test for test in tests if not test.public]
        limits, began = self._spec.sandbox.limits, time.monotonic()
        verdict = self._verdict(*self._run(source, hidden, limits, stop_early=self._spec.mode == "all"), weak)
        if not ranked or verdict.reward is None:
            return verdict
        left = limits.model_copy(update={"program_s": limits.program_s - (time.monotonic() - began)})
        result, total = self._run(source, [test for test in tests if test.public], left, stop_early=False)
        if not result.status.bears_reward:
            return self._verdict(result, total, weak)
        return replace(verdict, rank=result.passed / total, failing_test=_number(verdict.failing_test, tests))

    def _run(
        self, source: str, tests: Sequence[AnyTest], limits: SandboxLimits, *, stop_early: bool
    ) -> tuple[ProgramResult, int]:
        """The result of the program on some tests, and the number of cases that they make."""
        raw = source.encode("utf-8", "surrogatepass")
        if (refused := too_long(raw, limits)) is not None:  # before each case of a function test repeats the program
            return refused, count_cases(tests)
        cases = make_cases(tests, source, self._spec.tolerance)
        program = raw if reads_stdin(tests) else HARNESS
        return self._sandbox.judge(program, cases, limits, stop_early=stop_early), len(cases)

    def _verdict(self, result: ProgramResult, total: int, weak: bool) -> Verdict:
        status, last = result.status, result.last
        if status is VerdictStatus.WRONG_ANSWER and result.detail.startswith(COMPILE_ERROR):
            status = VerdictStatus.COMPILE_ERROR
        reward: float | None = None
        if status.bears_reward:
            values = self._spec.values
            reward = values.passed if status is VerdictStatus.PASSED else values.failed
            if self._spec.mode == "fraction":
                reward = result.passed / total
        return Verdict(
            status,
            reward,
            detail=one_line(result.detail),
            failing_test=result.failing_test,
            cpu_ms=round(result.cpu_ms, 1),
            wall_ms=round(result.wall_ms, 1),
            peak_mb=round(result.peak_mb, 1),
            stdout=escaped(last.stdout, SHOWN) if last else "",
            stderr=escaped(last.stderr[-SHOWN:], SHOWN) if last else "",
            unsafe=self._sandbox.unsafe,
            weak_oracle=weak,
        )

    def close(self) -> None:
        if self._owned:
            self._sandbox.close()


def _number(failing: int | None, tests: Sequence[AnyTest]) -> int | None:
    """The place among all of the row's cases of a failing one that was counted among those not public."""
    of_case = [test for test in tests for _ in range(count_cases([test]))]
    return None if failing is None else [place for place, test in enumerate(of_case) if not test.public][failing]
