"""What an evaluation makes of its samples: breakdowns, votes, and samples on disk that a later run takes up."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from services.eval_samples import SampleLog
from services.evaluate import summarise
from services.run_folder import RunFolder
from volley.records import Group, Prompt, Scores, Verdict, VerdictStatus

PROMPTS = [Prompt(f"p{i}", f"text {i}", {}, {"level": str(i % 2), "id": f"p{i}"}) for i in range(4)]
REWARDS = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], dtype=np.float64)
ANSWERS = np.array([[0, 1, 1, 0], [0, 1, 2, -1], [0, 0, 0, 0], [0, 1, 0, 2]], dtype=np.int32)


def test_a_tag_value_has_the_estimates_of_its_prompts_alone() -> None:
    whole = summarise(PROMPTS, REWARDS, ANSWERS, (1, 2, 4), version=3, seed=1)
    assert [e.mean for e in whole.estimates] == pytest.approx([0.4375, (5 / 6 + 0 + 1 + 0.5) / 4, 0.75])
    levels = {each.value: each for each in whole.by_tag if each.tag == "level"}
    for value, rows in (("0", [0, 2]), ("1", [1, 3])):
        alone = summarise([PROMPTS[i] for i in rows], REWARDS[rows], ANSWERS[rows], (1, 2, 4), version=3, seed=1)
        assert (levels[value].prompts, levels[value].estimates, levels[value].majority) == (
            2,
            alone.estimates,
            alone.majority,
        )
    row = json.loads(json.dumps(whole.row()))
    assert row["by_tag"][0].keys() == {"tag", "value", "prompts", "estimates", "majority"}


def test_majority_is_the_mean_over_all_draws_of_k_votes() -> None:
    (estimate,) = summarise(PROMPTS[:1], REWARDS[:1], ANSWERS[:1], (3,), version=0, seed=0).majority
    votes = []
    for draw in itertools.combinations(range(4), 3):
        answers = [int(ANSWERS[0, i]) for i in draw]
        most = max(answers.count(answer) for answer in answers)
        winners = {answer for answer in answers if answers.count(answer) == most}
        votes.append(np.mean([REWARDS[0, list(ANSWERS[0]).index(answer)] for answer in winners]))
    assert estimate.mean == pytest.approx(float(np.mean(votes)))


def test_there_is_no_majority_without_answers_or_where_one_answer_is_paid_in_two_ways() -> None:
    none = np.full_like(ANSWERS, -1)
    assert summarise(PROMPTS, REWARDS, none, (1,), version=0, seed=0).majority == ()
    assert summarise(PROMPTS, REWARDS, np.zeros_like(ANSWERS), (1,), version=0, seed=0).majority == ()


def test_a_tag_that_names_every_prompt_is_no_breakdown() -> None:
    many = [Prompt(str(i), "x", {}, {"id": str(i)}) for i in range(65)]
    rewards, answers = np.zeros((65, 2)), np.full((65, 2), -1, np.int32)
    assert summarise(many, rewards, answers, (1,), version=0, seed=0).by_tag == ()


def group(n: int) -> Group:
    return Group(
        group_id=-1,
        prompt_id="p",
        prompt_p=np.zeros(1, np.int32),
        tokens_T=np.zeros(n, np.int32),
        logprobs_T=np.zeros(n, np.float32),
        versions_T=np.zeros(n, np.int32),
        lengths_n=np.ones(n, np.int32),
        stopped_n=np.ones(n, np.bool_),
        texts=tuple(f"sample {i}" for i in range(n)),
        actor="actor-0",
        seconds=0.1,
    )


def test_whole_prompts_are_taken_up_and_what_is_left_of_others_goes(tmp_path: Path) -> None:
    log = SampleLog(RunFolder(tmp_path))
    scores = Scores.pack([Verdict(VerdictStatus.PASSED, 1.0, answer="7"), Verdict(VerdictStatus.WRONG_ANSWER, 0.0)])
    assert log.take_up(PROMPTS, 2) == {}
    for index in (0, 2):
        log.write(index, PROMPTS[index], group(2), scores)
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    log.write(3, PROMPTS[3], group(2), scores)
    longer = path.read_bytes()
    for cut in range(len(whole), len(longer)):  # wherever the interruption came
        path.write_bytes(longer[:cut])
        known = log.take_up(PROMPTS, 2)
        assert known.keys() == {"p0", "p2"}
        assert path.read_bytes() == whole
    assert known["p0"].rewards_n.tolist() == [1.0, 0.0]
    assert known["p0"].answers_n.tolist() == [0, -1]
    changed = [Prompt("p0", "another text"), PROMPTS[2]]
    assert log.take_up(changed, 2).keys() == {"p2"}
