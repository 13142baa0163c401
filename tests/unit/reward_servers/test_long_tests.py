"""Test code and programs of any length take time in proportion, or are refused with what to write instead."""

import time
from typing import Any, cast

import pytest

from reward_servers.sandbox.health import Sandbox
from reward_servers.scorers.asserts import MAX_ASSERTS, MAX_CODE, split_asserts
from reward_servers.scorers.cases import count_cases, parse_tests
from reward_servers.scorers.code import Code
from volley.errors import JobError
from volley.records import Prompt, VerdictStatus
from volley.scoring import CodeScorer


def test_long_test_code_is_split_in_linear_time() -> None:
    """Each statement is looked at once, however many assertions follow it."""

    def seconds(pairs: int) -> float:
        code = "\n".join(f"x{i} = {i}\nassert f(x{i}) == {i}" for i in range(pairs))
        began = time.thread_time()
        assert len(split_asserts(code)) == pairs
        return time.thread_time() - began

    seconds(10)
    assert seconds(800) < 30 * seconds(80)


def test_test_code_has_bounds_that_name_the_way_out() -> None:
    for code, advice in (
        (f"assert f('{'x' * MAX_CODE}') == 1", "calls with their results as"),
        ("assert f(1) == 1\n" * (MAX_ASSERTS + 1), "so write fewer"),
        (f"x = '{'x' * (MAX_CODE // 2)}'\n" + "assert f(x) == 1\n" * 100, "into a loop"),
    ):
        with pytest.raises(ValueError, match=advice):
            split_asserts(code)
    half = {"asserts": "assert f(1) == 1\n" * (MAX_ASSERTS // 2)}
    assert count_cases(parse_tests([half, half])) == MAX_ASSERTS
    with pytest.raises(ValueError, match="so write fewer"):
        parse_tests([half, half, half])
    row = Prompt("p1", "", {"tests": [half, half, half]})
    with pytest.raises(JobError, match=r"prompt p1: the code scorer needs tests: .*so write fewer"):
        Code.check_row(CodeScorer(), row)


def test_the_variable_of_a_comprehension_is_not_the_object_of_that_name() -> None:
    setup = "cache = Cache(2)\n"
    (own,) = split_asserts(f"{setup}assert cache.get(1) == 4")
    (answer,) = split_asserts(f"{setup}assert [cache.get(1) for cache in f(2)] == [4]")
    assert (own.weak, answer.weak) == (False, True)


@pytest.mark.parametrize("option", ["rel_tol='x'", "abs_tol=[1]", "rel_tol=eps"])
def test_a_tolerance_that_is_no_number_is_left_to_the_program(option: str) -> None:
    (split,) = split_asserts(f"import math\nassert math.isclose(f(1), 4, {option})")
    assert split.weak


class NoSandbox:
    """Fails the test if a program would run."""

    unsafe = False

    def judge(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("it ran")


def test_a_program_that_is_too_long_is_not_repeated_for_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_servers.scorers.code.make_cases", NoSandbox().judge)
    row = Prompt("p", "", {"tests": [{"function": "f", "expected": 1, "public": at < 2} for at in range(4)]})
    scorer = Code(CodeScorer(extract="raw"), cast(Sandbox, NoSandbox()))
    (verdict,) = scorer.score(row, ["#" * (300 << 10)])
    assert (verdict.status, verdict.failing_test, verdict.rank) == (VerdictStatus.COMPILE_ERROR, 2, 0.0)
    assert verdict.detail == "the program is longer than 256 kB"
