"""Validates the tests of a ``code`` row and turns them into the judge's test cases.

{"stdin": "3 4\\n", "expected": "7\\n"}                       input and expected output of a program
{"function": "add", "args": [3, 4], "expected": 7}          a call and its expected result, as JSON
{"asserts": "assert add(3, 4) == 7", "function": "add"}     assertions, or a ``check(candidate)`` function

A test with ``"public": true`` ranks the sample for best_of_k; the others decide its reward.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from reward_servers.sandbox.judge import Case, same_tokens
from reward_servers.scorers.asserts import SplitAssert, check_total, split_asserts
from reward_servers.scorers.values import Check, Malformed, read_answer, same, shown
from volley.base import Spec

MAX_TESTS = 1000
HARNESS = Path(__file__).with_name("harness.py").read_bytes()
COMPILE_ERROR = "compile error: "


class _Test(Spec):
    public: bool = False  # ranks the sample for best_of_k, and does not count in its reward


class StdinTest(_Test):
    """Standard input of the program and its expected output, compared word by word."""

    stdin: str = ""
    expected: str


class CallTest(_Test):
    """A call of a function of the program, or a method of its class ``Solution``, and the expected JSON result."""

    function: str = Field(pattern=r"^[A-Za-z_]\w*$")
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    expected: object


class AssertTest(_Test):
    """Trusted test code with assertions; ``candidate`` in it stands for ``function``."""

    asserts: str
    function: str | None = Field(None, pattern=r"^[A-Za-z_]\w*$")

    @functools.cached_property
    def splits(self) -> list[SplitAssert]:
        """The assertions. Raises ValueError (see `split_asserts`)."""
        return split_asserts(self.asserts, self.function)


AnyTest = StdinTest | CallTest | AssertTest
_TESTS: TypeAdapter[list[AnyTest]] = TypeAdapter(list[AnyTest])


def parse_tests(raw: object) -> list[AnyTest]:
    """Validate the tests of one problem. Raises ValueError with the supported formats."""
    try:
        tests = _TESTS.validate_python(raw)
    except ValidationError as problem:
        where = ".".join(str(part) for part in problem.errors()[0]["loc"])
        raise ValueError(
            f'tests ({where or "missing"}): each must be {{"stdin", "expected"}}, '
            '{"function", "args", "expected"} or {"asserts", "function"}'
        ) from problem
    if not 1 <= len(tests) <= MAX_TESTS:
        raise ValueError(f"{len(tests)} tests: a problem needs 1 to {MAX_TESTS}")
    if len({isinstance(test, StdinTest) for test in tests}) > 1:
        raise ValueError("a problem cannot mix stdin tests and function tests")
    if all(test.public for test in tests):
        raise ValueError("all tests are public: these only rank a sample, so mark fewer; the others decide its reward")
    check_total([split for test in tests if isinstance(test, AssertTest) for split in test.splits])
    return tests


def reads_stdin(tests: Sequence[AnyTest]) -> bool:
    """Return True if the program runs as a script, False if the harness calls its functions."""
    return isinstance(tests[0], StdinTest)


def is_weak(tests: Sequence[AnyTest]) -> bool:
    """Return whether any assertion is decided inside the sandbox."""
    return any(split.weak for test in tests if isinstance(test, AssertTest) for split in test.splits)


def count_cases(tests: Sequence[AnyTest]) -> int:
    """Return how many cases `make_cases` returns."""
    return sum(len(test.splits) if isinstance(test, AssertTest) else 1 for test in tests)


def make_cases(tests: Sequence[AnyTest], source: str, tolerance: float | None) -> list[Case]:
    """Return the judge's test cases. For function tests, standard input passes the source and the call to the harness.

    Args:
        tests: validated tests.
        source: the program.
        tolerance: allowed difference between numbers, absolute or relative; None requires equality.
    """
    cases: list[Case] = []
    for test in tests:
        if isinstance(test, StdinTest):
            cases.append(Case(test.stdin.encode(), same_tokens(test.expected.encode(), tolerance)))
        elif isinstance(test, CallTest):
            call = {"source": source, "function": test.function, "args": test.args, "kwargs": test.kwargs}
            cases.append(Case(json.dumps(call).encode(), _returns(_json_equal(test.expected, tolerance))))
        else:
            for split in test.splits:
                request = {"source": source, "setup": split.setup, "expression": split.expression}
                cases.append(Case(json.dumps(request).encode(), _returns(split.check)))
    return cases


def _json_equal(wanted: object, tolerance: float | None) -> Check:
    return lambda value: same(value, wanted, tolerance, json_types=True)


def _returns(check: Check) -> Any:
    def judge(stdout: bytes) -> str | None:
        try:
            kind, content = read_answer(stdout)
        except Malformed as problem:
            return str(problem)
        if kind == "compile_error":
            return f"{COMPILE_ERROR}{content[:1000]}"
        return None if check(content) else f"returned {shown(content)}"

    return judge
