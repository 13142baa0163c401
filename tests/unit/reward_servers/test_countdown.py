"""The countdown scorer, compared with Python's own arithmetic and a brute-force search."""

import ast
import operator
from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_servers.scorers import build_scorer, check_scorer
from reward_servers.scorers.countdown import ParseError, parse
from volley.errors import JobError
from volley.records import Prompt, VerdictStatus
from volley.scoring import CountdownScorer, RewardValues

OPS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return OPS[type(node.op)](evaluate(node.left), evaluate(node.right))
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> str:
    if depth == 0 or draw(st.booleans()):
        return str(draw(st.integers(0, 99)))
    left, op, right = draw(expressions(depth - 1)), draw(st.sampled_from("+-*")), draw(expressions(depth - 1))
    whole = f"{left}{draw(st.sampled_from(['', ' ']))}{op}{right}"
    return f"({whole})" if draw(st.booleans()) else whole


@given(expressions())
def test_values_equal_pythons(text: str) -> None:
    tree = ast.parse(text, mode="eval")
    if len("".join(text.split())) > 256:
        with pytest.raises(ParseError):
            parse(text)
        return
    assert parse(text).value == evaluate(tree.body)
    used = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, int)]
    assert sorted(parse(text).numbers) == sorted(used)


@given(expressions())
def test_the_canonical_form_is_stable_and_keeps_the_value(text: str) -> None:
    if len("".join(text.split())) > 256:
        return
    first = parse(text)
    if len(first.canonical) <= 256:
        again = parse(first.canonical) if not first.canonical.startswith("-") else None
        assert again is not None
        assert (again.canonical, again.value) == (first.canonical, first.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1+2*3", "3*2 + 1"), ("(1+2)+3", "3+(2+1)"), ("4-(1-2)", "4+2-1"), ("2*(3*(1+4))", "(4+1)*3*2"), ("01+2", "2+1")],
)
def test_equivalent_expressions_vote_together(one: str, other: str) -> None:
    assert parse(one).canonical == parse(other).canonical


@pytest.mark.parametrize("one, other", [("1-2", "2-1"), ("(1+2)*3", "1+2*3"), ("2*(3-1)", "(1-3)*2")])  # noqa: PT006
def test_different_expressions_do_not_vote_together(one: str, other: str) -> None:
    assert parse(one).canonical != parse(other).canonical


@pytest.mark.parametrize(
    "text",
    ["", " ", "1+", "+1", "-1+2", "1 2 3 a", "(1+2", "1+2)", "1/2", "1**2", "2^3", "__import__('os')", "1e3", "1.0",
     "9999999", "(" * 17 + "1" + ")" * 17, "1+" * 200 + "1", "１+2", "()", "1\x00+2", "(" * 100_000],
)  # fmt: skip
def test_anything_else_is_no_answer(text: str) -> None:
    with pytest.raises(ParseError):
        parse(text)


def prompt(numbers: list[int], target: int) -> Prompt:
    return Prompt("p:1", "", {"numbers": numbers, "target": target})


def test_verdicts() -> None:
    scorer = build_scorer(CountdownScorer(values=RewardValues(passed=2.0, failed=-1.0)))
    texts = ["3*8*1*1", "8*3*1 *1", "8*3*1", "8*3+1-1*0", "8+3+1+1", "no idea"]
    verdicts = scorer.score(prompt([8, 3, 1, 1], 24), texts)
    statuses = [v.status for v in verdicts]
    wrong = VerdictStatus.WRONG_ANSWER
    assert statuses == [VerdictStatus.PASSED] * 2 + [wrong] * 3 + [VerdictStatus.NO_ANSWER]
    assert [v.reward for v in verdicts] == [2.0, 2.0, -1.0, -1.0, -1.0, -1.0]
    assert verdicts[0].answer == verdicts[1].answer != verdicts[2].answer
    assert verdicts[5].answer is None
    assert "equals 13" in verdicts[4].detail


def test_every_solution_of_a_brute_force_search_passes() -> None:
    numbers = [8, 3, 1, 1]
    scorer, target, found = build_scorer(CountdownScorer()), 24, 0
    for a, b, c, d in set(permutations(numbers)):
        for o in "+-*":
            for p in "+-*":
                for q in "+-*":
                    text = f"({a}{o}{b}){p}({c}{q}{d})"
                    right = evaluate(ast.parse(text, mode="eval").body) == target
                    (verdict,) = scorer.score(prompt(numbers, target), [text])
                    assert (verdict.reward == 1.0) is right
                    found += right
    assert found > 0


@pytest.mark.parametrize(
    "reference",
    [{}, {"numbers": [1, 2]}, {"target": 3}, {"numbers": "12", "target": 3}, {"numbers": [1, "2"], "target": 3},
     {"numbers": [], "target": 1}, {"numbers": [1], "target": True}],
)  # fmt: skip
def test_a_bad_row_is_reported(reference: dict[str, object]) -> None:
    with pytest.raises(JobError, match="prompt p:7"):
        check_scorer(CountdownScorer(), [Prompt("p:7", "", reference)])


def test_a_good_row_is_accepted() -> None:
    check_scorer(CountdownScorer(), [prompt([1, 2, 3, 4], 10)])
