"""The exact and python scorers: verdicts, bad rows, and functions that raise, hang, print or kill their process."""

import sys
from pathlib import Path

import pytest

from reward_servers.scorers import build_scorer, check_scorer, try_scorer
from volley.errors import JobError
from volley.records import Prompt, VerdictStatus
from volley.scoring import ExactScorer, PythonScorer, SumScorer, WeightedTerm

FUNCTIONS = """
import os, sys, time

def length(sample, row):
    print("noise on standard output")
    os.write(1, b"more noise")
    return len(sample) - row["offset"]

def voting(sample, row):
    return {"reward": 1.0, "answer": sample[0], "detail": "a\\nb"}

def ranked(sample, row):
    return {"reward": 1.0, "rank": {"long": len(sample), "none": None}.get(row["rank"], row["rank"])}

def trouble(sample, row):
    if sample == "raise": raise KeyError("gone")
    if sample == "hang": time.sleep(60)
    if sample == "exit": os._exit(3)
    if sample == "nan": return float("nan")
    if sample == "text": return "good"
    return 1.0
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


def test_exact_compares_answers() -> None:
    scorer = build_scorer(ExactScorer())
    verdicts = scorer.score(Prompt("p", "", {"answer": " yes\n"}), ["yes", "  yes ", "no", " "])
    assert [v.status.value for v in verdicts] == ["passed", "passed", "wrong_answer", "no_answer"]
    assert [v.answer for v in verdicts] == ["yes", "yes", "no", None]


def test_exact_needs_its_field() -> None:
    with pytest.raises(JobError, match=r"prompt p:3.*'solution'"):
        check_scorer(ExactScorer(field="solution"), [Prompt("p:3", "", {"answer": "x"})])


def test_python_calls_the_function_with_the_row() -> None:
    scorer = build_scorer(PythonScorer(target="my_rewards:length"))
    verdicts = scorer.score(Prompt("p", "", {"offset": 2}), ["abc", "a", "x" * 200_000])
    assert [v.reward for v in verdicts] == [1.0, -1.0, 199_998.0]
    scorer.close()
    scorer.close()


def test_python_may_return_an_answer() -> None:
    scorer = build_scorer(PythonScorer(target="my_rewards:voting"))
    (verdict,) = scorer.score(Prompt("p", ""), ["seven"])
    assert (verdict.answer, verdict.detail) == ("s", "a\\nb")
    scorer.close()


def test_python_may_return_a_rank() -> None:
    scorer = build_scorer(PythonScorer(target="my_rewards:ranked"))
    assert [v.rank for v in scorer.score(Prompt("p", "", {"rank": "long"}), ["seven", "a"])] == [5.0, 1.0]
    assert [v.rank for v in scorer.score(Prompt("p", "", {"rank": "none"}), ["seven"])] == [None]
    for wrong, detail in (("nan", "the rank is nan"), ("high", "could not convert")):
        (verdict,) = scorer.score(Prompt("p", "", {"rank": wrong}), ["seven"])
        assert verdict.status is VerdictStatus.INFRA_ERROR
        assert detail in verdict.detail
    scorer.close()


def test_a_failing_function_is_an_infra_error_and_the_next_sample_is_scored() -> None:
    scorer = build_scorer(PythonScorer(target="my_rewards:trouble", timeout_s=1.0))
    texts = ["fine", "raise", "hang", "fine", "exit", "nan", "text", "fine"]
    verdicts = scorer.score(Prompt("p", ""), texts)
    scorer.close()
    for text, verdict in zip(texts, verdicts, strict=True):
        expected = VerdictStatus.PASSED if text == "fine" else VerdictStatus.INFRA_ERROR
        assert verdict.status is expected, text
    assert "KeyError" in verdicts[1].detail
    assert "within 1 s" in verdicts[2].detail
    assert "exit status" in verdicts[4].detail


@pytest.mark.parametrize(
    ("target", "message"),
    [("no_such_module:f", "does not import"), ("my_rewards:absent", "has no function 'absent'")],
)
def test_the_python_target_must_be_importable(target: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_scorer(PythonScorer(target=target), [])


def test_a_raising_function_is_quoted_with_its_line_and_its_traceback_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scorer = build_scorer(PythonScorer(target="my_rewards:trouble"))
    verdicts = scorer.score(Prompt("p", "", {}), ["raise", "raise", "fine"])
    scorer.close()
    line = FUNCTIONS.splitlines().index('    if sample == "raise": raise KeyError("gone")') + 1
    where = f"KeyError: 'gone' (line {line} of my_rewards.py, in trouble)"
    assert [verdict.detail for verdict in verdicts] == [f"my_rewards:trouble raised {where}"] * 2 + [""]
    (logged,) = [record.getMessage() for record in caplog.records]
    assert 'if sample == "raise": raise KeyError("gone")' in logged
    assert "python_child" not in logged, "only the user's frames"


@pytest.mark.parametrize(("answer", "told"), [("raise", "KeyError: 'gone'"), ("exit", "exit status 3")])
def test_trying_a_scorer_raises_what_the_function_raises(answer: str, told: str) -> None:
    spec = SumScorer(terms=(WeightedTerm(scorer=PythonScorer(target="my_rewards:trouble")),))
    (called,) = try_scorer(spec, Prompt("p:1", "", {}), "")
    assert (called[0], called[1].reward) == ("my_rewards:trouble", 1.0)
    with pytest.raises(JobError, match=rf"called with prompt p:1 and the answer '{answer}': .*{told}") as error:
        try_scorer(spec, Prompt("p:1", "", {}), answer)
    assert ("Traceback" in str(error.value)) == (answer == "raise")
    assert try_scorer(ExactScorer(), Prompt("p:1", "", {}), "") == [], "it names no function"
