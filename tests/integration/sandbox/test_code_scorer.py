# ruff: noqa: E501 - one program per line
"""The code scorer with real sandboxes: three kinds of tests, rewards, and hacks that fool in-process graders."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from reward_servers.sandbox.health import Sandbox
from reward_servers.scorers import check_scorer
from reward_servers.scorers.code import Code
from volley.errors import JobError
from volley.records import Prompt, Verdict
from volley.scoring import CodeScorer, RewardValues, SandboxLimits, SandboxSpec

pytestmark = pytest.mark.integration

SPEC = SandboxSpec(limits=SandboxLimits(cpu_s=1.0))
ADD = [{"function": "add", "args": [3, 4], "expected": 7}, {"function": "add", "args": [1, 1], "expected": 2}]
SUMS: list[dict[str, Any]] = [{"stdin": f"{i} {i}\n", "expected": f"{2 * i}\n"} for i in range(4)]
RIGHT = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    one = Sandbox(SPEC, index=31)
    yield one
    one.close()


def score(sandbox: Sandbox, tests: Any, *texts: str, **spec: Any) -> list[Verdict]:
    scorer = Code(CodeScorer(sandbox=SPEC, extract=spec.pop("extract", "raw"), **spec), sandbox)
    return scorer.score(Prompt("p", "", {"tests": tests}), texts)


def test_stdin_tests(sandbox: Sandbox) -> None:
    half = "a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)"
    texts = [RIGHT, half, "print(", "1 / 0", "while True: pass", " ", RIGHT]
    verdicts = score(sandbox, SUMS, *texts)
    assert [v.status.value for v in verdicts] == [
        "passed", "wrong_answer", "compile_error", "runtime_error", "timeout", "no_answer", "passed",
    ]  # fmt: skip
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert verdicts[1].failing_test == 2
    assert "'0' instead of '4'" in verdicts[1].detail
    assert "ZeroDivisionError" in verdicts[3].stderr
    assert verdicts[0].cpu_ms is not None
    assert not verdicts[0].unsafe


def test_fraction_of_tests_passed(sandbox: Sandbox) -> None:
    flaky = "a, b = map(int, input().split())\nprint(a + b if a != 2 else 1 / 0)"
    verdicts = score(sandbox, SUMS, RIGHT, flaky, "print()", "print(", mode="fraction")
    assert [v.reward for v in verdicts] == [1.0, 0.75, 0.0, 0.0]
    assert verdicts[1].failing_test == 2


def test_public_tests_rank_a_sample_and_the_others_pay_it(sandbox: Sandbox) -> None:
    tests = [{**test, "public": number in (0, 2)} for number, test in enumerate(SUMS)]
    memorised = "a, b = map(int, input().split())\nprint({0: 0, 2: 4}.get(a, -1))"
    half = "a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)"
    verdicts = score(sandbox, tests, RIGHT, memorised, half, "print(", " ")
    assert [v.rank for v in verdicts] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [v.failing_test for v in verdicts[1:3]] == [1, 3]
    assert [v.rank for v in score(sandbox, SUMS, RIGHT, " ")] == [None, None]
    called = [{**ADD[0], "public": True}, ADD[1]]
    (verdict,) = score(sandbox, called, "def add(a, b): return 2")
    assert (verdict.reward, verdict.rank) == (1.0, 0.0)
    with pytest.raises(JobError, match="all tests are public"):
        check_scorer(CodeScorer(sandbox=SPEC), [Prompt("p", "", {"tests": [{**SUMS[0], "public": True}]})])


def test_hidden_and_public_tests_share_one_time_limit(sandbox: Sandbox) -> None:
    tests = [{"stdin": "", "expected": "x", "public": public} for public in (False, True)]
    spec = SPEC.model_copy(update={"limits": SandboxLimits(cpu_s=4.0, program_s=2.0)})
    began = time.monotonic()
    scorer = Code(CodeScorer(sandbox=spec, extract="raw"), sandbox)
    (verdict,) = scorer.score(Prompt("p", "", {"tests": tests}), ["import time\ntime.sleep(60)"])
    assert time.monotonic() - began < 3.5
    assert (verdict.status.value, verdict.rank) == ("timeout", 0.0)


def test_reward_values_and_tolerance(sandbox: Sandbox) -> None:
    tests = [{"stdin": "", "expected": "3.14159"}]
    exact = score(sandbox, tests, "print(3.1416)", values=RewardValues(passed=2, failed=0.5))
    near = score(sandbox, tests, "print(3.1416)", "print(3.2)", "print('nan')", tolerance=1e-4)
    assert [v.reward for v in exact + near] == [0.5, 1.0, 0.0, 0.0]


def test_programs_are_extracted_from_code_fences(sandbox: Sandbox) -> None:
    texts = [
        f"Think.\n```python\nprint(0)\n```\nBetter:\n```py\n{RIGHT}\n```\nDone.",
        f"```\n{RIGHT}",
        "no program",
        "```python\n```",
    ]
    verdicts = score(sandbox, SUMS, *texts, extract="last_fence")
    assert [v.status.value for v in verdicts] == ["passed", "no_answer", "no_answer", "no_answer"]


def test_function_calls_are_judged(sandbox: Sandbox) -> None:
    texts = [
        "def add(a, b):\n print('noise')\n return a + b",
        "class Solution:\n def add(self, a, b): return a + b",
        "def add(a, b): return 7",
        "def add(a, b): return float(a + b)",
        "def add(a, b): return str(a + b)",
        "def add(a, b): return a + b == 7 or a + b == 2",
        "def sub(a, b): return 0",
        "def add(a, b",
    ]
    verdicts = score(sandbox, ADD, *texts)
    passed, wrong = "passed", "wrong_answer"
    assert [v.status.value for v in verdicts] == [
        passed, passed, wrong, passed, wrong, wrong, "runtime_error", "compile_error",
    ]  # fmt: skip
    assert verdicts[2].failing_test == 1


ASSERTS = """
import math
assert f(2) == 4
assert f(3) == 9 and f(-1) == 1
assert abs(f(0.5) - 0.25) < 1e-6
assert math.isclose(f(1.5), 2.25)
assert f(4) in (16, 17)
assert [f(1), f(2)] == [1, 4]
"""
HACKS = {
    "equal_to_all": "class E(int):\n def __eq__(s, o): return True\n def __ne__(s, o): return False\n __hash__ = int.__hash__\ndef f(x): return E(0)",
    "always_near": "class N(float):\n def __sub__(s, o): return 0.0\n def __abs__(s): return 0.0\n def __eq__(s, o): return True\n __hash__ = None\ndef f(x): return N(5)",
    "patched_assert": "import builtins\nbuiltins.AssertionError = type('X', (Exception,), {})\ndef f(x): return 0",
    "patched_abs": "import builtins, math\nbuiltins.abs = lambda x: 0\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
    "patched_json": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return 0",
    "stack_frames": "import sys\ndef f(x):\n fr = sys._getframe(1)\n return fr.f_locals.get('expected', fr.f_globals.get('expected'))",
    "early_exit": "import os\nos._exit(0)",
    "exit_in_call": "def f(x): raise SystemExit(0)",
    "print_answer": "import os\nos.write(1, b'{\"value\": {\"int\": \"0x4\"}}')\nos._exit(0)",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nclass A:\n def __getattr__(s, n): return lambda *a: True\ndef f(x): return A()",
    "gc_search": "import gc\ndef f(x):\n return next((o for o in gc.get_objects() if isinstance(o, tuple) and o == (16, 17)), 0)",
}  # fmt: skip


ODD_VALUES = {
    "a huge integer": "1 << 20000",
    "a long integer": "10 ** 4301",
    "a huge integer as a key": "{10 ** 5000: 1}",
    "equal hashes": "set(n * (2 ** 61 - 1) for n in range(1, 3000))",
    "deep": "__import__('functools').reduce(lambda inner, _: [inner], range(300), 7)",
    "too deep": "__import__('functools').reduce(lambda inner, _: [inner], range(5000), 7)",
    "a cycle": "(lambda l: (l.append(l), l)[1])([])",
    "not a number": "float('nan')",
    "surrogates": "'\\ud800'",
    "a liar": "type('L', (int,), {'__eq__': lambda *a: True, '__hash__': lambda s: 7, '__repr__': lambda s: 1 / 0})(3)",
    "no repr": "type('N', (), {'__repr__': lambda s: 1 / 0})()",
    "an item without end": "type('I', (), {'item': lambda s: s})()",
    "a dict that lies": "type('D', (dict,), {'items': lambda s: 3})()",
    "a generator": "(n for n in range(3))",
    "a class": "int",
    "broken JSON": "(__import__('os').write(1, b'{'), __import__('os').write(3, b'{'))",
}


@pytest.mark.parametrize("value", ODD_VALUES)
def test_whatever_a_program_returns_the_verdict_is_about_the_program(sandbox: Sandbox, value: str) -> None:
    restarts = sandbox.restarts
    tests = [
        {"function": "f", "args": [], "expected": {"1": 1}},
        {"asserts": "assert f() == {1: 1}\nassert f() == {1}"},
    ]
    for test in tests:
        (verdict,) = score(sandbox, [test], f"def f():\n return {ODD_VALUES[value]}")
        assert verdict.reward == 0.0, verdict
        assert verdict.status.value in ("wrong_answer", "runtime_error", "output_limit"), verdict
    assert sandbox.restarts == restarts


def test_assertions_are_judged(sandbox: Sandbox) -> None:
    tests = [{"asserts": ASSERTS}]
    right, wrong = score(sandbox, tests, "def f(x): return x * x", "def f(x): return x + x")
    assert right.status.value == "passed", right
    assert not right.weak_oracle
    assert wrong.status.value == "wrong_answer"
    assert wrong.failing_test == 1


@pytest.mark.parametrize("hack", HACKS)
def test_hacks_of_in_process_graders_earn_nothing(sandbox: Sandbox, hack: str) -> None:
    (verdict,) = score(sandbox, [{"asserts": ASSERTS}], HACKS[hack])
    assert verdict.reward == 0.0, verdict


def test_check_function_of_a_candidate(sandbox: Sandbox) -> None:
    check = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n\ncheck(total)\n"
    tests = [{"asserts": check, "function": "total"}]
    right, wrong = score(sandbox, tests, "def total(xs): return sum(xs)", "def total(xs): return 3")
    assert (right.status.value, wrong.status.value) == ("passed", "wrong_answer")


def test_tests_that_cannot_be_split_are_marked_weak(sandbox: Sandbox) -> None:
    tests = [{"asserts": "for i in range(3):\n    assert f(i) == i * i\nassert f(2) != f(3)"}]
    right, wrong = score(sandbox, tests, "def f(x): return x * x", "def f(x): return 0")
    assert (right.status.value, right.weak_oracle) == ("passed", True)
    assert wrong.reward == 0.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "missing"),
        ([], "0 tests"),
        ([{"stdin": "x"}], "each must be"),
        ([{"stdin": "", "expected": ""}, ADD[0]], "cannot mix"),
        ([{"asserts": "x = 1"}], "contains no assert"),
        ([{"asserts": "assert ("}], "does not parse"),
        ([{"function": "a.b", "expected": 1}], "each must be"),
    ],
)
def test_bad_rows_are_reported(tests: Any, message: str) -> None:
    with pytest.raises(JobError, match=f"prompt p:9.*{message}"):
        check_scorer(CodeScorer(), [Prompt("p:9", "", {"tests": tests})])
