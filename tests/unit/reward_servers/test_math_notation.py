"""Which notation a math answer may use: the symbolic parser drops what it does not know, so little may reach it."""

import json
import string
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reward_servers.sandbox.health import Sandbox
from reward_servers.sandbox.judge import Case, ProgramResult
from reward_servers.scorers.math import Math
from reward_servers.scorers.math_check import equal
from reward_servers.scorers.math_text import has_foreign_notation, normal
from volley.errors import JobError
from volley.records import Prompt, VerdictStatus
from volley.scoring import MathScorer

COMMANDS = (
    "frac sqrt pi times div pm mp infty log ln lg exp sin cos tan max min gcd lcm binom dbinom cfrac begin end degree "
    "circ overline bar hat vec lfloor rfloor lceil rceil lvert rvert langle rangle quad qquad prime operatorname Large "
    "alpha theta Delta leq geq lt gt neq in notin cup cap setminus mathbb emptyset land lor mid cdot left right"
)
# Not the closing brace, which ends the box.
MARKS = [*set(string.punctuation) - {"}"}, *(f"\\{name} " for name in COMMANDS.split()), "\\text{or}"]
SHAPES = ("{right}{mark}{wrong}", "{right}{mark}{{{wrong}}}", "{wrong}{mark}{right}", "{right}^{{{mark}}}{wrong}")
FAIR = {"y=x", "42=17"}  # an answer may name its variable


class InProcess:
    """Stands in for the sandbox; these expressions are small."""

    def judge(self, _source: bytes, cases: Sequence[Case], _limits: object) -> ProgramResult:
        request = json.loads(cases[0].stdin)
        try:
            found = equal(request["gold"], request["answer"])
        except Exception:  # noqa: BLE001 - in the sandbox, any exception of the parser ends in "different"
            found = False
        status = VerdictStatus.PASSED if found else VerdictStatus.WRONG_ANSWER
        return ProgramResult(status, int(found), None, None)


def accepted(gold: str, answer: str) -> bool:
    scorer = Math(MathScorer(), cast("Sandbox", InProcess()))
    (verdict,) = scorer.score(Prompt("p", "", {"answer": gold}), [f"\\boxed{{{answer}}}"])
    return verdict.status is VerdictStatus.PASSED


class Unneeded:
    """Stands in for the sandbox where its result does not matter."""

    def judge(self, _source: bytes, _cases: Sequence[Case], _limits: object) -> ProgramResult:
        return ProgramResult(VerdictStatus.WRONG_ANSWER, 0, 0, None)


PIECES = [
    "\\frac",
    "\\text{",
    "\\sqrt",
    "{",
    "}",
    "(",
    ")",
    "^",
    "*10^",
    "/",
    "+",
    "-",
    "e",
    "E",
    ".",
    ",",
    "!",
    "=",
    "\\",
]
NUMBERS = ["0", "17", "1,234", "9" * 200, "\u00b2", "\u0663", "1e9999", "10e+-5", "1e--5", "1*10^{+-3}"]


@given(
    st.lists(st.sampled_from(PIECES + NUMBERS), max_size=30).map("".join),
    st.sampled_from(["17", "\\frac{1}{2}", "(1,2)"]),
)
@example("10e+-5", "17")
def test_every_answer_gets_a_verdict(answer: str, gold: str) -> None:
    scorer = Math(MathScorer(), cast("Sandbox", Unneeded()))
    (verdict,) = scorer.score(Prompt("p", "", {"answer": gold}), [f"The answer is: {answer}"])
    assert verdict.reward is not None


def test_an_expected_answer_that_is_too_long_to_compare_is_an_error_of_the_row() -> None:
    with pytest.raises(JobError, match=r"prompt p: .*more than 1000 characters: write the final answer alone"):
        Math.check_row(MathScorer(), Prompt("p", "", {"answer": "9" * 5000}))
    Math.check_row(MathScorer(), Prompt("p", "", {"answer": "so " * 5000 + "\\boxed{9}"}))


@pytest.mark.parametrize(("right", "wrong"), [("17", "42"), ("x", "y")])
def test_no_mark_between_a_right_and_a_wrong_value_hides_the_wrong_one(right: str, wrong: str) -> None:
    answers = {shape.format(right=right, wrong=wrong, mark=mark) for shape in SHAPES for mark in MARKS} - FAIR
    assert [answer for answer in sorted(answers) if accepted(right, answer)] == []


@pytest.mark.parametrize("mark", ["?", "'", '"', "`", "#", "@", "_1", "_{2}", "^*", "^{*}", "^T", "^{T}", "^{\\prime}"])
def test_a_mark_on_a_right_value_counts_only_if_the_expected_answer_has_it(mark: str) -> None:
    for value in ("17", "x"):
        assert not accepted(value, value + mark)
        assert has_foreign_notation(normal(value + mark), value)
        assert accepted(value + mark, value + mark)


@pytest.mark.parametrize(
    "answer",
    [
        "42\\cup17",
        "17\\in\\{17,42\\}",
        "17\\approx42",
        "17\u00b042",
        "17\\foo",
        "17<42",
        "17^{\\infty}42",
        "17^\u221e42",
    ],
)
def test_notation_that_the_parser_misreads_is_foreign(answer: str) -> None:
    assert has_foreign_notation(answer, "17")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("90", "90\\degree"), ("90", "90^\\circ"), ("25", "25\u00b0C"), ("25", "25\\degree\\text{ C}"),
     ("5", "5\\text{ cm}"), ("5", "5^{\\text{th}}"), ("5", "$5$ cm"), ("5", "5\\$"), ("3", "\\log_2 8"),
     ("101_2", "101_{2}"), ("a_1+1", "1+a_1"), ("x'+1", "1+x'"), ("17", "\\Large 17"),
     ("30\u00b015'", "30^\\circ 15'"), ("\\infty", "\u221e"), ("\u221e", "\\infty"), ("-\\infty", "-\\infty"),
     ("x>5", "(5,\\infty)"), ("[0,\\infty)", "[0,\u221e)")],
)  # fmt: skip
def test_units_degrees_and_notation_of_the_expected_answer_count(gold: str, answer: str) -> None:
    assert accepted(gold, answer)
