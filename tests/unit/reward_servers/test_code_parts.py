"""The parts of the code scorer that need no sandbox: extraction, assertion splitting, values, comparison, outcomes."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_servers.sandbox.judge import same_tokens
from reward_servers.sandbox.outcome import classify
from reward_servers.scorers.asserts import split_asserts
from reward_servers.scorers.base import escaped, one_line
from reward_servers.scorers.extract import last_fenced_block, program_in
from reward_servers.scorers.harness import encode
from reward_servers.scorers.values import Malformed, decode, read_answer, same
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


@given(PLAIN)
def test_values_survive_the_way_out(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert again == value
    assert type(again) is type(value)
    assert same(again, value)


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
    assert same({1: "a"}, {"1": "a"}, json_types=True)


@pytest.mark.parametrize(
    "stdout",
    [b"", b"null", b"[]", b'{"value"', b'{"value": {"int": 5}}', b'{"value": {"int": "x"}}',
     b'{"value": {"a": 1, "b": 2}}', b'{"value": {"set": [{"list": []}]}}', b"[" * 100_000, b"\xff"],
)  # fmt: skip
def test_forged_answers_are_malformed(stdout: bytes) -> None:
    with pytest.raises(Malformed):
        read_answer(stdout)


class Liar(int):
    """Equal to everything, in the process that made it."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_a_liar_leaves_as_a_plain_number() -> None:
    assert not same(decode(encode(Liar(3))), 4)


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
def test_assertions_split(code: str, expression: str, right: Any, wrong: Any) -> None:
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
def test_the_rest_is_weak(code: str) -> None:
    (split,) = split_asserts(code)
    assert split.weak
    assert split.check(True)
    assert not split.check(1)


def test_statements_before_an_assertion_are_its_setup() -> None:
    first, second = split_asserts("x = 1\nassert f(x) == 1 and f(2) == 2", "g")
    assert first.setup == second.setup == "candidate = g\nx = 1"
    assert (first.expression, second.expression) == ("f(x)", "f(2)")


@given(st.text(alphabet="`\n pyx"))
def test_extraction_is_total(text: str) -> None:
    block = last_fenced_block(text)
    assert block is None or block.strip()


def test_extraction() -> None:
    assert last_fenced_block("```py\na\n```\n```\nb\n```\n```\nc") == "b\n"
    assert program_in(" \n", "raw") is None
    assert last_fenced_block("`" * 1_000_000) is None


def test_tokens() -> None:
    check = same_tokens(b"1 2.50 x\n", 1e-3)
    assert check(b"1\n2.5001   x") is None
    assert check(b"1 2.6 x") is not None
    assert check(b"1 2.5") == "2 words instead of 3"
    assert check(b"1 2.5 x\0") is not None
    assert same_tokens(b"nan", 1.0)(b"0") is not None


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
def test_outcomes(changed: dict[str, Any], stderr: bytes, flags: dict[str, bool], status: VerdictStatus | None) -> None:
    flags = {"flooded": False, "killed_for_memory": False, **flags}
    assert classify({**ANSWER, **changed}, b"", stderr, SandboxLimits(), **flags).failure is status


def test_a_program_that_was_never_confined_is_no_outcome() -> None:
    with pytest.raises(ValueError, match="confinement failed"):
        classify({**ANSWER, "setup_error": "x"}, b"", b"", SandboxLimits(), flooded=False, killed_for_memory=False)


def test_output_is_escaped_for_logs() -> None:
    assert escaped(b"a\x1b[31m\nb\xff", 100) == "a\\x1b[31m\nb\\xff"
    assert "\n" not in one_line("a\nb\x1b[2J")
    assert len(escaped(b"x" * 10_000, 50)) == 50
