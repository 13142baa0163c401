"""The ``reasoning_gym`` scorer on every set: own answers pass, junk does not, and answers run only in the sandbox."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reward_servers.sandbox.health import Sandbox
from reward_servers.scorers.base import Scorer
from reward_servers.scorers.reasoning_gym import PACKAGES, ReasoningGym, answer_in
from services.data.prompts import read_prompts
from volley.data import DataSpec
from volley.errors import JobError
from volley.records import Prompt, VerdictStatus
from volley.scoring import ReasoningGymScorer

pytestmark = pytest.mark.integration

# These give no answer of their own: any correct one passes.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
# These compile the answer as Python, some through sympy, and so would execute it in the process that scores.
EXECUTED = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
}
JUNK_PASSES = {"game_of_life_halting"}  # any text passes where the right answer is False
JUNK = "I do not know"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    spec = ReasoningGymScorer().sandbox
    made = Sandbox(spec.model_copy(update={"packages": PACKAGES}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def scorer(sandbox: Sandbox) -> ReasoningGym:
    return ReasoningGym(ReasoningGymScorer(timeout_s=20), sandbox)


@pytest.fixture(scope="module")
def scanned() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(canaries())
    return found


def canaries(*arguments: str) -> str:
    """Score in another process without a sandbox. Importing reasoning-gym gives warnings, which are errors here."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.sandbox.gym_canaries", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def prompts(scanned: dict[str, list[str]]) -> list[Prompt]:
    names = scanned["names"]
    sets = [{"name": name} for name in names]
    made = read_prompts(DataSpec.model_validate({"generator": "reasoning_gym", "sets": sets, "size": len(sets)}))
    assert len(names) > 100
    assert sorted(prompt.tags["set"] for prompt in made) == names
    return made


def test_own_answers_pass_and_junk_does_not(scorer: Scorer, prompts: list[Prompt]) -> None:
    failed, passing_junk = set(), set()
    for prompt in prompts:
        name, answer = prompt.tags["set"], prompt.reference["answer"]
        own, junk = scorer.score(prompt, [answer or "", JUNK])
        if own.status is not VerdictStatus.PASSED:
            failed.add(name)
        if junk.status is not VerdictStatus.WRONG_ANSWER:
            assert junk.status is VerdictStatus.PASSED
            passing_junk.add(name)
    assert {prompt.tags["set"] for prompt in prompts if prompt.reference["answer"] is None} == WITHOUT_ANSWER
    assert failed == WITHOUT_ANSWER
    assert passing_junk <= JUNK_PASSES


def test_some_scorers_execute_the_answer(
    scorer: Scorer, prompts: list[Prompt], scanned: dict[str, list[str]], tmp_path: Path
) -> None:
    assert set(scanned["compiled"]) == EXECUTED
    target = tmp_path / "written"
    attack = f"__import__('pathlib').Path({str(target)!r}).write_text('x')"
    (verdict,) = scorer.score(next(each for each in prompts if each.tags["set"] == "binary_matrix"), [attack])
    assert verdict.status is VerdictStatus.WRONG_ANSWER
    assert not target.exists()
    canaries(attack)
    assert target.exists()  # without the sandbox it is executed


def test_scores_between_pass_from_the_threshold_on(sandbox: Sandbox, prompts: list[Prompt]) -> None:
    prompt = next(prompt for prompt in prompts if prompt.tags["set"] == "chain_sum")
    answer = f"= {prompt.reference['answer']}"  # its score is the share of characters that are the answer's
    share = len(prompt.reference["answer"]) / len(answer)
    for passed_at, status in ((share, VerdictStatus.PASSED), (share + 0.01, VerdictStatus.WRONG_ANSWER)):
        made = ReasoningGym(ReasoningGymScorer(passed_at=passed_at, partial=True), sandbox)
        (verdict,) = made.score(prompt, [answer])
        assert verdict.status is status
        assert verdict.reward == pytest.approx(share)


def test_a_scorer_that_hangs_is_stopped(sandbox: Sandbox, prompts: list[Prompt]) -> None:
    prompt = next(prompt for prompt in prompts if prompt.tags["set"] == "binary_matrix")
    made = ReasoningGym(ReasoningGymScorer(timeout_s=0.5), sandbox)
    slow, right = made.score(prompt, ["9**9**9", prompt.reference["answer"]])
    assert (slow.status, slow.reward) == (VerdictStatus.TIMEOUT, 0.0)
    assert right.status is VerdictStatus.PASSED


def test_a_task_of_another_version_is_not_scored(scorer: Scorer, prompts: list[Prompt]) -> None:
    prompt = prompts[0]
    old = replace(prompt, reference={**prompt.reference, "task": {**prompt.reference["task"], "version": "0.1.0"}})
    with pytest.raises(JobError, match=r"comes from reasoning-gym 0\.1\.0, and .* is installed"):
        ReasoningGym.check_row(ReasoningGymScorer(), old)
    (verdict,) = scorer.score(old, ["x"])
    assert verdict.status is VerdictStatus.INFRA_ERROR


def test_rows_without_a_task_are_refused() -> None:
    with pytest.raises(JobError, match=r"needs a task: use data: \{generator: reasoning_gym"):
        ReasoningGym.check_row(ReasoningGymScorer(), Prompt("p", "1 + 1", {"answer": "2"}, {}))


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        ("so <answer> 4 </answer> or <answer>5\n</answer>", "either", "5"),
        (" 4 \n", "either", "4"),
        ("4", "tag", None),
        ("<answer> </answer>", "tag", None),
        ("<answer>4", "tag", None),
        ("1 + 1,200 = -1,201.50.", "number", "-1,201.50"),
        ("<answer>7 apples</answer> of 9", "number", "7"),
        ("none", "number", None),
        (" <answer>4</answer> ", "whole", "<answer>4</answer>"),
    ],
)
def test_where_the_answer_is(text: str, extract: str, answer: str | None) -> None:
    assert answer_in(text, extract) == answer
