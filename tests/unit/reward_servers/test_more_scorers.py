"""The regex, arc, http and sum scorers."""

import json
import time

import httpx
import pytest

from reward_servers.scorers import build_scorer, check_scorer
from reward_servers.scorers.arc import last_grid
from reward_servers.scorers.reasoning_gym import answer_in
from reward_servers.scorers.remote import Remote
from volley.errors import JobError
from volley.records import Prompt, VerdictStatus
from volley.scoring import (
    ArcScorer,
    ExactScorer,
    FormatTerm,
    HttpScorer,
    LengthTerm,
    RegexScorer,
    SumScorer,
    WeightedTerm,
)

PROMPT = Prompt("p:1", "question", {"answer": "yes", "pattern": r"\d+", "grid": [[1, 0], [0, 1]]})


def test_regex_matches_the_whole_sample_or_anywhere() -> None:
    whole, anywhere = build_scorer(RegexScorer()), build_scorer(RegexScorer(whole=False))
    texts = [" 12 ", "a12", "x"]
    assert [v.reward for v in whole.score(PROMPT, texts)] == [1.0, 0.0, 0.0]
    assert [v.reward for v in anywhere.score(PROMPT, texts)] == [1.0, 1.0, 0.0]
    whole.close()
    anywhere.close()


def test_a_regex_that_backtracks_forever_times_out_only_its_sample() -> None:
    scorer = build_scorer(RegexScorer(pattern="(a+)+$", timeout_s=0.5))
    verdicts = scorer.score(PROMPT, ["a" * 40 + "b", "aaa"])
    scorer.close()
    assert [v.status for v in verdicts] == [VerdictStatus.TIMEOUT, VerdictStatus.PASSED]


def test_regex_patterns_are_checked() -> None:
    with pytest.raises(JobError, match="does not compile"):
        check_scorer(RegexScorer(pattern="("), [])
    with pytest.raises(JobError, match="prompt p:2"):
        check_scorer(RegexScorer(), [Prompt("p:2", "", {})])


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(" * 5000 + ")" * 5000, "does not compile: maximum recursion depth"),
        ("a{99999999999}", "does not compile: the repetition number is too large"),
        ("x" * 10_001, "10001 characters, and may have 10000: write a shorter one"),
    ],
)
def test_a_regex_pattern_that_cannot_be_used_is_an_error_of_the_row(pattern: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem) as error:
        check_scorer(RegexScorer(), [Prompt("p:2", "", {"pattern": pattern})])
    assert str(error.value).startswith("prompt p:2: ")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("<answer>1</answer> <answer> 2\n</answer> 3", "tag", "2"),
        ("<answer>1<answer>2</answer>3</answer>", "tag", "1<answer>2"),
        ("<answer>1</answer><answer>2", "tag", "1"),
        ("</answer>1", "tag", None),
        ("about 7, or <answer>x 1,000.5 y</answer>", "number", "1,000.5"),
        ("7 <answer></answer>", "number", None),
        ("7 <answer></answer>", "either", None),
        ("7", "either", "7"),
        ("7 <answer>8</answer>", "whole", "7 <answer>8</answer>"),
    ],
)
def test_the_answer_to_a_generated_task_is_in_the_last_pair_of_tags(text: str, how: str, answer: str | None) -> None:
    assert answer_in(text, how) == answer


def test_tags_that_are_never_closed_are_searched_once() -> None:
    began = time.thread_time()
    assert answer_in("<answer>" * 20_000, "tag") is None
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("[[1, 0], [0, 1]]", None),
        ("1 0\n0 1", ((1, 0), (0, 1))),
        ("10\n01\n", ((1, 0), (0, 1))),
        ("[[1, 0],\n [0, 1]]", ((1, 0), (0, 1))),
        ("first\n9 9\nthen\n1 0\n0 1\n\n", ((1, 0), (0, 1))),
        ("1 0\n0 1 1", None),
        ("no grid", None),
        ("1 x\n", None),
        ("\u0661 \u0662", None),
    ],
)
def test_arc_grids(text: str, grid: object) -> None:
    assert last_grid(text) == (((1, 0, 0, 1),) if text.startswith("[[1, 0], [0") else grid)


def test_arc_rewards() -> None:
    texts = ["1 0\n0 1", "1 1\n0 1", "1 0", "none"]
    assert [v.reward for v in build_scorer(ArcScorer()).score(PROMPT, texts)] == [1.0, 0.0, 0.0, 0.0]
    assert [v.reward for v in build_scorer(ArcScorer(partial=True)).score(PROMPT, texts)] == [1.0, 0.75, 0.0, 0.0]
    with pytest.raises(JobError, match="prompt p:3"):
        check_scorer(ArcScorer(), [Prompt("p:3", "", {"grid": [[1], [1, 2]]})])


def remote(*answers: httpx.Response | Exception, attempts: int = 3) -> tuple[Remote, list[httpx.Request]]:
    queue, seen = list(answers), []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        answer = queue.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    spec = HttpScorer(url="http://rewards.test/score", attempts=attempts, timeout_s=5)
    return Remote(spec, httpx.MockTransport(handle)), seen


def test_http_sends_the_group_and_reads_rewards() -> None:
    scorer, seen = remote(httpx.Response(200, json={"rewards": [1.0, 0.0, None]}))
    verdicts = scorer.score(PROMPT, ["a", "b", "c"])
    scorer.close()
    assert [v.reward for v in verdicts] == [1.0, 0.0, None]
    assert json.loads(seen[0].content)["samples"] == ["a", "b", "c"]
    assert json.loads(seen[0].content)["row"]["answer"] == "yes"


def test_http_reads_ranks() -> None:
    scorer, _ = remote(httpx.Response(200, json={"rewards": [1.0, 0.0, None], "ranks": [0.5, None, 3]}))
    assert [v.rank for v in scorer.score(PROMPT, ["a", "b", "c"])] == [0.5, None, None]
    scorer.close()


def test_http_retries_temporary_errors() -> None:
    scorer, seen = remote(httpx.Response(503), httpx.ConnectError("no"), httpx.Response(200, json={"rewards": [1]}))
    assert scorer.score(PROMPT, ["a"])[0].reward == 1.0
    scorer.close()
    assert len(seen) == 3


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404),
        httpx.Response(200, text="no json"),
        httpx.Response(200, json={"rewards": [1, 2]}),
        httpx.Response(200, json={"rewards": ["1"]}),
        httpx.Response(200, json={"rewards": [1], "ranks": [1, 2]}),
        httpx.Response(200, json={"rewards": [1], "ranks": ["high"]}),
        httpx.Response(200, text='{"rewards": [1], "ranks": [NaN]}'),
        httpx.Response(200, json=[]),
    ],
)
def test_http_failures_are_infra_errors(answer: httpx.Response) -> None:
    scorer, seen = remote(answer)
    assert scorer.score(PROMPT, ["a"])[0].status is VerdictStatus.INFRA_ERROR
    scorer.close()
    assert len(seen) == 1


def test_sum_weights_and_clamps_rewards_and_keeps_the_first_answer() -> None:
    terms = (
        WeightedTerm(scorer=ExactScorer(), weight=1.0),
        WeightedTerm(scorer=FormatTerm(contains=("<a>", "</a>")), weight=0.5),
        WeightedTerm(scorer=LengthTerm(start=2, end=12), weight=-1.0),
    )
    scorer = build_scorer(SumScorer(terms=terms, minimum=-0.25))
    verdicts = scorer.score(PROMPT, ["yes", "<a></a>", "</a><a> and so on"])
    assert [v.reward for v in verdicts] == [pytest.approx(0.1), pytest.approx(0.0), 0.0]
    assert verdicts[0].answer == "yes"
    assert verdicts[0].status is VerdictStatus.PASSED


def test_sum_keeps_an_infra_error() -> None:
    scorer = build_scorer(
        SumScorer(
            terms=(
                WeightedTerm(scorer=ExactScorer()),
                WeightedTerm(scorer=HttpScorer(url="http://127.0.0.1:9/", attempts=1, timeout_s=1)),
            )
        )
    )
    (verdict,) = scorer.score(PROMPT, ["yes"])
    scorer.close()
    assert verdict.status is VerdictStatus.INFRA_ERROR
    assert verdict.reward is None
