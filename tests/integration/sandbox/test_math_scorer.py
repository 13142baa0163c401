"""The math scorer: equivalence pairs, tricks that must earn nothing, expressions that explode, injections."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_servers.scorers import check_scorer
from reward_servers.scorers.math import Math
from reward_servers.scorers.math_text import final_answer, normal, rational, too_costly
from tests.integration.sandbox.math_pairs import PAIRS
from volley.errors import JobError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import MathScorer

pytestmark = pytest.mark.integration

BOUND_S = 12.5  # 2.5 x timeout_s, three times that on a busy host, and 5 s for the reply


@pytest.fixture(scope="module")
def scorer() -> Iterator[Math]:
    one = Math(MathScorer(timeout_s=2.0))
    yield one
    one.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Math]:
    one = Math(MathScorer(timeout_s=1.0))
    yield one
    one.close()


def score(scorer: Math, gold: str, *texts: str) -> list[Verdict]:
    return scorer.score(Prompt("p", "", {"answer": gold}), texts)


def test_there_are_300_pairs() -> None:
    assert len(PAIRS) >= 300
    assert sum(right for _, _, right in PAIRS) > 100 < sum(not right for _, _, right in PAIRS)


def test_equivalence_pairs(scorer: Math) -> None:
    wrong = []
    for gold, answer, right in PAIRS:
        (verdict,) = score(scorer, gold, f"So the result is \\boxed{{{answer}}}.")
        if (verdict.reward == 1.0) is not right:
            wrong.append((gold, answer, verdict.status.value, verdict.detail))
    assert not wrong


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("3", "\\boxed{4=3}"),
        ("12", "The final answer is 12. \\boxed{7}"),
        ("12", "The final answer is 12. \\boxed{"),
        ("(1,2)", "\\boxed{1,2}"),
        ("5", "\\boxed{5} or rather \\boxed{6}"),
        ("5", "<think>\\boxed{5}</think> \\boxed{6}"),
        ("5", "\\boxed{5\u200b}"),
        ("5", "\\boxed{\u202e5}"),
        ("5", "\\boxed{5\0}"),
        ("5", "\\boxed{" + " " * 400 + "5}"),
        ("5", "\\boxed{5" + "{" * 5000),
        ("5", ""),
    ],
)
def test_tricks_earn_nothing(scorer: Math, gold: str, text: str) -> None:
    (verdict,) = score(scorer, gold, text)
    assert verdict.reward == 0.0, verdict


@pytest.mark.parametrize(
    "bomb",
    ["(10^9)!", "9^{9^{9}}", "2^{2^{2^{2^{99}}}}", "\\binom{10^9}{10^8}", "((((3!)!)!)!)!", "\\int_0^{10^9} x^x dx",
     "10^{10^{10}}", "\\sum_{k=1}^{10^{12}} \\frac{1}{k}", "x^{x^{x^{x^{x}}}}", "\\prod_{p}^{10^9} p", "(x+1)^{999}",
     "(a+b+c+d+e+f)^{300}", "\\sqrt{" * 30 + "2" + "}" * 30, "1" * 299, "+".join(["x"] * 140), "(" * 140 + ")" * 140],
)  # fmt: skip
def test_exploding_expressions_time_out_and_do_not_block_the_worker(impatient: Math, bomb: str) -> None:
    began = time.monotonic()
    (verdict,) = score(impatient, "x^2+7", f"\\boxed{{{bomb}}}")
    assert verdict.status in (VerdictStatus.WRONG_ANSWER, VerdictStatus.TIMEOUT, VerdictStatus.MEMORY_LIMIT), verdict
    assert time.monotonic() - began < BOUND_S
    assert (verdict.cpu_ms or 0) <= 1100, "it is ended within its second of CPU time"
    (after,) = score(impatient, "x^2+7", "\\boxed{7+x^2}")
    assert after.status is VerdictStatus.PASSED


@pytest.mark.parametrize(
    "injection",
    ["__import__('os').system('touch {mark}')", "\\text{{__import__('os').system('touch {mark}')}}", "eval('1+1')",
     "open('{mark}','w')", "lambda: open('{mark}','w')", "\\input{{/etc/passwd}}", "\\write18{{touch {mark}}}"],
)  # fmt: skip
def test_injected_code_is_not_run(scorer: Math, injection: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (verdict,) = score(scorer, "2", "\\boxed{" + injection.format(mark=mark) + "}")
    assert verdict.reward == 0.0
    assert not mark.exists()


def test_equal_answers_vote_together(scorer: Math) -> None:
    texts = [f"\\boxed{{{answer}}}" for answer in ("0.5", "2/4", "x=\\frac12", "3/4", "0.75")]
    verdicts = score(scorer, "\\frac{1}{2}", *texts)
    assert len({v.answer for v in verdicts[:3]}) == 1
    assert len({v.answer for v in verdicts[3:]}) == 1
    assert verdicts[0].answer != verdicts[3].answer


def test_the_final_answer_is_extracted() -> None:
    assert final_answer("a \\boxed{\\frac{1}{2}} b", "boxed") == "\\frac{1}{2}"
    assert final_answer("The final answer is 42. I hope it is correct.", "either") == "42"
    assert final_answer("The final answer is $3.5$", "either") == "$3.5$"
    assert final_answer("nothing here", "either") is None
    assert rational(normal("-1,234.5")) == rational("-2469/2")
    assert rational("1/0") is None
    assert too_costly("x^2+1") is None
    for text in ("x^3+x^2+1", "y^2+x^2=1", "x^2-x^2+1/2", "x^{2}y^{2}", "(x^2+y^2)^2", "e^{2x}+e^{-x}", "2^{10}3^{5}"):
        assert too_costly(text) is None, text
    for text in (
        "9^9^9",
        "9^{9^9}",
        "9^{9}^{9}",
        "9^(9^9)",
        "((9^9)^9)^9",
        "(99^99)^99",
        "9^-9^9",
        "9^ 9^9",
        "x^{y^{z}}",
    ):
        assert too_costly(text) == "a large power", text


def test_bad_rows_are_reported() -> None:
    with pytest.raises(JobError, match=r"prompt p:4.*'answer'"):
        check_scorer(MathScorer(), [Prompt("p:4", "", {"answer": ""})])
