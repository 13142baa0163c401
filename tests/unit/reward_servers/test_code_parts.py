"""Parts of the code scorer that need no sandbox: extraction, splitting of assertions, values, comparison, outcomes."""

import gc
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_servers.sandbox.judge import Case, same_tokens, verdict_of
from reward_servers.sandbox.outcome import Outcome, classify
from reward_servers.scorers.asserts import split_asserts
from reward_servers.scorers.base import escaped, one_line
from reward_servers.scorers.cases import AnyTest, AssertTest, CallTest, StdinTest, make_cases
from reward_servers.scorers.extract import last_fenced_block, program_in
from reward_servers.scorers.harness import encode
from reward_servers.scorers.values import Malformed, read_answer, same
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


def left_as(value: Any) -> Any:
    """``value`` after it was encoded in the sandbox and decoded outside."""
    return read_answer(json.dumps({"value": encode(value)}).encode())[1]


@given(PLAIN)
def test_values_survive_encoding(value: Any) -> None:
    assert same(left_as(value), value)
    assert not same(left_as([value]), [value, 0])


@pytest.mark.parametrize(
    ("got", "wanted"),
    [(1, True), (True, 1), (0, False), ([1], (1,)), ("1", 1), (None, False), ([1], [1, 2]), ({1: 2}, {1: 3})],
)
def test_types_are_strict(got: Any, wanted: Any) -> None:
    assert not same(got, wanted)


def test_numbers_and_tolerance() -> None:
    assert same(2, 2.0)
    assert same([0.1 + 0.2], [0.3], 1e-9)
    assert not same(0.1 + 0.2, 0.3)
    assert not same(math.nan, 1.0, 1e9)
    assert same((1, [2]), [1, [2]], json_types=True)
    assert same(left_as({1: "a", "b": (1,)}), {"1": "a", "b": [1]}, json_types=True)
    assert not same(left_as({1: "a", "1": "a"}), {"1": "a"}, json_types=True)
    assert not same(math.inf, 1.0, 1e9)
    assert same(math.inf, math.inf, 1e-9)
    for number in (0, 17, -math.inf, math.nan, 1e308):
        assert not same(number, math.inf, 1e-9), "an expected infinity is not near everything"


def test_sets_and_dicts_are_equal_whatever_their_order() -> None:
    assert same(left_as({3, 1.0, "x", (1, frozenset({2}))}), {"x", 1, 3.0, (1.0, frozenset({2}))})
    assert not same(left_as({1, 2}), {1, 3})
    assert not same(left_as({True}), {1})
    assert not same(left_as({1, 2}), [1, 2])
    assert same(left_as({"b": {1: [2]}, "a": 1 + 0j}), {"a": 1 + 0j, "b": {1: [2.0]}})
    assert not same(left_as({"a": 1}), {"a": 1, "b": 2})
    assert not same(left_as({"a": 1, "b": 2}), {"a": 1})
    assert not same(left_as({1: 0.1}), {1: 0.2}, 0.01)
    assert same(left_as({1: 0.1}), {1: 0.2}, 0.5)
    assert same(left_as(set()), set())
    assert same(left_as({}), {})


@pytest.mark.parametrize(
    "stdout",
    [b"", b"null", b"[]", b'{"value"', b'{"value": {"int": 5}}', b'{"value": {"int": "x"}}',
     b'{"value": {"a": 1, "b": 2}}', b'{"value": {"set": [3]}}', b"[" * 100_000, b"\xff", b'{"value": 3}',
     b'{"value": {"dict": [["a"]]}}', b'{"value": {"dict": [["a", "b", "c"]]}}', b'{"value": {"other": ["x"]}}',
     b'{"compile_error": 3}', b'{"value": null, "value": null}', b'{"value": NaN}', b"7" * 10_000],
)  # fmt: skip
def test_forged_answers_are_rejected_as_malformed(stdout: bytes) -> None:
    with pytest.raises(Malformed):
        read_answer(stdout)


class Liar(int):
    """Equal to everything in the process that created it."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_an_object_that_equals_everything_is_encoded_as_a_plain_number() -> None:
    assert not same(left_as(Liar(3)), 4)


@pytest.mark.parametrize(
    ("code", "expression", "right", "wrong"),
    [
        ("assert f(2) == 4", "f(2)", 4, 5),
        ("assert 4 == f(2)", "f(2)", 4, 5),
        ("assert f(2) is None", "f(2)", None, 0),
        ("assert f(2) is True", "f(2)", True, 1),
        ("assert f(2)", "f(2)", [1], []),
        ("assert not f(2)", "f(2)", 0, 1),
        ("assert abs(f(2) - 4) < 0.1", "f(2)", 4.05, 4.2),
        ("assert abs(4 - f(2)) <= 1", "f(2)", 5, "x"),
        ("assert math.isclose(f(2), 4)", "f(2)", 4.0, 4.1),
        ("assert math.isclose(4, f(2), rel_tol=0.1)", "f(2)", 4.3, 5.0),
        ("assert f(2) in [1, 4]", "f(2)", 4, 5),
        ("assert f(2) == [-1, (2, 'x')], 'message'", "f(2)", [-1, (2, "x")], [-1, [2, "x"]]),
    ],
)
def test_assertions_are_split_into_calls_and_expected_values(
    code: str, expression: str, right: Any, wrong: Any
) -> None:
    (split,) = split_asserts(code)
    assert split.expression == expression
    assert not split.weak
    assert split.check(right)
    assert not split.check(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "assert f(1) == g(2)",
        "assert f(1) != 3",
        "assert f(1) < f(2)",
        "assert f(1) or f(2)",
        "for i in x:\n assert i",
        "assert all(f(i) == 2 * i for i in range(10))",
        "assert isinstance(f(3), list)",
        "assert equal(f(3), [1, 2])",
        "assert f(3).startswith('a')",
        "got = f(3)\ndef equal(a, b):\n    return a == b\nassert equal(got, 3)",
        "from helpers import equal\ngot = f(3)\nassert equal(got, 3)",
    ],
)
def test_other_assertions_are_marked_weak(code: str) -> None:
    (split,) = split_asserts(code)
    assert split.weak
    assert split.check(True)
    assert not split.check(1)


def test_statements_before_an_assertion_are_its_setup() -> None:
    first, second = split_asserts("x = 1\nassert f(x) == 1 and f(2) == 2", "g")
    assert first.setup == second.setup == "candidate = g\nx = 1"
    assert (first.expression, second.expression) == ("f(x)", "f(2)")


@given(st.text(alphabet="`\n pyx"))
def test_extraction_never_raises(text: str) -> None:
    block = last_fenced_block(text)
    assert block is None or block.strip()


def test_extraction_finds_the_program() -> None:
    assert last_fenced_block("```py\na\n```\n```\nb\n```\n```\nc") == "b\n"
    assert program_in(" \n", "raw") is None
    assert last_fenced_block("`" * 1_000_000) is None


def test_outputs_are_compared_by_tokens() -> None:
    check = same_tokens(b"1 2.50 x\n", 1e-3)
    assert check(b"1\n2.5001   x") is None
    assert check(b"1 2.6 x") is not None
    assert check(b"1 2.5") == "2 words instead of 3"
    assert check(b"1 2.5 x\0") is not None
    assert same_tokens(b"nan", 1.0)(b"0") is not None
    assert same_tokens(b"inf", 1e-6)(b"3") is not None
    assert same_tokens(b"-inf", 1e-6)(b"inf") is not None
    assert same_tokens(b"inf", 1e-6)(b"Infinity") is None


ANSWER = {
    "exit": 0,
    "timed_out": False,
    "setup_error": "",
    "compile_error": "",
    "cpu_s": 0.1,
    "wall_s": 0.2,
    "peak_mb": 9.0,
}


@pytest.mark.parametrize(
    ("changed", "stderr", "flags", "status"),
    [
        ({}, b"", {}, None),
        ({"exit": 1}, b"ValueError", {}, VerdictStatus.RUNTIME_ERROR),
        ({"exit": 1}, b"...\nMemoryError\n", {}, VerdictStatus.MEMORY_LIMIT),
        ({"exit": -9}, b"", {"killed_for_memory": True}, VerdictStatus.MEMORY_LIMIT),
        ({"exit": -9}, b"", {"flooded": True}, VerdictStatus.OUTPUT_LIMIT),
        ({"exit": -9, "timed_out": True}, b"", {}, VerdictStatus.TIMEOUT),
        ({"exit": -24}, b"", {}, VerdictStatus.TIMEOUT),
        ({"exit": -9, "cpu_s": 4.2}, b"", {}, VerdictStatus.TIMEOUT),
        ({"cpu_s": 4.2}, b"", {}, VerdictStatus.TIMEOUT),
        ({"exit": -25}, b"", {}, VerdictStatus.OUTPUT_LIMIT),
        ({"exit": -31}, b"", {}, VerdictStatus.SECURITY_VIOLATION),
        ({"exit": -11}, b"", {}, VerdictStatus.RUNTIME_ERROR),
        ({"exit": 1, "compile_error": "SyntaxError"}, b"", {}, VerdictStatus.COMPILE_ERROR),
    ],
)
def test_outcomes_become_verdict_statuses(
    changed: dict[str, Any], stderr: bytes, flags: dict[str, bool], status: VerdictStatus | None
) -> None:
    flags = {"flooded": False, "killed_for_memory": False, **flags}
    assert classify({**ANSWER, **changed}, b"", stderr, SandboxLimits(), **flags).failure is status


def test_an_unconfined_program_has_no_outcome() -> None:
    with pytest.raises(ValueError, match="confinement failed"):
        classify({**ANSWER, "setup_error": "x"}, b"", b"", SandboxLimits(), flooded=False, killed_for_memory=False)


# What a program can write as its answer: any bytes, any JSON, any encoded value, each forged or honest.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["int", "set", "dict", "other", "value"]), inner),
    max_leaves=15,
)
HUGE = st.integers(1000, 60_000).map(lambda bits: -3 << bits) | st.sampled_from([math.nan, -math.inf, "\ud800"])
VALUES = st.recursive(
    PLAIN | HUGE, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.integers(), inner)
)
OUTPUTS = (
    st.binary()
    | JSON.map(lambda value: json.dumps({"value": value}).encode())
    | VALUES.map(lambda value: json.dumps({"value": encode(value)}).encode())
    | st.integers(1, 100_000).map(lambda deep: b'{"value": ' + b'{"list": [' * deep)
    | st.integers(1, 2000).map(lambda deep: b'{"value": ' + b'{"list": [' * deep + b"]}" * deep + b"}")
)
EXPECTED = st.none() | st.integers() | st.floats() | st.lists(st.integers()) | st.dictionaries(st.text(), st.integers())
ASSERTION = st.sampled_from(
    ["f(1) == 4", "f(1) == {1, 2}", "f(1) == {'a': 1}", "f(1) in (1, [2])", "abs(f(1) - 4.5) < 0.1", "f(1)", "not f(1)",
     "math.isclose(f(1), 4.5)", "f(1) is None", "f(1) > f(2)"]
)  # fmt: skip


@given(OUTPUTS, EXPECTED, ASSERTION, st.none() | st.floats(1e-9, 1e9))
def test_every_output_gets_a_verdict(output: bytes, expected: Any, assertion: str, tolerance: float | None) -> None:
    """Whatever a program returns or writes, it gets a verdict of its own, in time."""
    tests: list[AnyTest] = [
        CallTest(function="f", args=[], expected=expected),
        AssertTest(asserts=f"assert {assertion}"),
        StdinTest(expected=str(expected)),
    ]
    for test in tests:
        (case,) = make_cases([test], "", tolerance)
        began = time.thread_time()
        wrong = case.check(output)
        assert wrong is None or len(wrong) < 2000
        assert time.thread_time() - began < 1.0


def outcome(stdout: bytes) -> Outcome:
    return Outcome(None, stdout, b"", 1.0, 1.0, 1.0)


def test_values_that_cannot_be_printed_are_wrong_answers() -> None:
    (case,) = make_cases([CallTest(function="f", expected=4)], "", None)
    for value in (1 << 20000, 10**4301, [10**5000], {10**5000: 1}, "x" * 100_000, [[["y" * 9999]] * 99] * 99):
        status, detail = verdict_of(outcome(json.dumps({"value": encode(value)}).encode()), case)
        assert status is VerdictStatus.WRONG_ANSWER
        assert detail.startswith("returned ")
        assert len(detail) < 100


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_equal_hashes_take_no_extra_time(kind: str) -> None:
    """``hash(n * (2**61 - 1))`` is 0 for every n, so a set of such numbers takes quadratic time."""
    (case,) = make_cases([AssertTest(asserts=f"assert f(1) == {'{1}' if kind == 'set' else '{1: 1}'}")], "", None)

    def seconds(factor: int) -> float:
        numbers = [{"int": hex(n * factor)} for n in range(1, 30_000)]
        items: list[Any] = numbers if kind == "set" else [[number, None] for number in numbers]
        output = json.dumps({"value": {kind: items}}).encode()
        gc.collect()
        gc.disable()  # a full collection looks at the objects of all tests so far
        try:
            began = time.thread_time()
            assert case.check(output) is not None
            return time.thread_time() - began
        finally:
            gc.enable()

    def shortest(factor: int) -> float:
        return min(seconds(factor) for _ in range(3))  # a virtual machine counts what its host takes away

    assert shortest((1 << 61) - 1) < 5 * shortest((1 << 61) + 1)


def test_a_comparison_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_servers.sandbox.judge.CHECK_S", 0.0)
    monkeypatch.setattr("reward_servers.sandbox.judge.CHECK_S_PER_MB", 0.0)
    words = b"1 " * 100_000
    case = Case(b"", same_tokens(b"1.0 " * 100_000, 0.1))
    assert verdict_of(outcome(words), case) == (VerdictStatus.TIMEOUT, "comparing its output took too long")
    (call,) = make_cases([CallTest(function="f", expected=[None] * 100_000)], "", None)
    status, _ = verdict_of(outcome(json.dumps({"value": {"list": [None] * 100_000}}).encode()), call)
    assert status is VerdictStatus.TIMEOUT
    assert call.check(json.dumps({"value": {"list": [None] * 100_000}}).encode()) is None, "no limit outside the judge"


def test_a_check_that_raises_is_a_wrong_answer() -> None:
    def check(_: bytes) -> str | None:
        raise KeyError("x")

    status, detail = verdict_of(outcome(b""), Case(b"", check))
    assert (status, detail) == (VerdictStatus.WRONG_ANSWER, "its output cannot be compared: KeyError")


@pytest.mark.parametrize(
    "nested", ["-" * 5000 + "1", "(" * 5000 + ")" * 5000, "+".join("1" * 3000), "not " * 3000 + "1"]
)
def test_an_assertion_nested_too_deeply_is_reported(nested: str) -> None:
    with pytest.raises(ValueError, match=r"nested|parse"):
        split_asserts(f"assert f(1) == {nested}")


def test_output_is_escaped_for_logs() -> None:
    assert escaped(b"a\x1b[31m\nb\xff", 100) == "a\\x1b[31m\nb\\xff"
    assert "\n" not in one_line("a\nb\x1b[2J")
    assert len(escaped(b"x" * 10_000, 50)) == 50
