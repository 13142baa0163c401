"""What an evaluation computes from its samples, and the samples on disk that a resumed run finds."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.evaluation.estimates import Evaluation, Sampled, summarise, tag_values
from services.evaluation.evaluate import evaluation_of
from services.evaluation.sample_log import SampleLog
from services.recording.display import evaluation_words
from services.recording.sinks.base import evaluation_row
from services.store.folder import RunFolder
from volley.errors import HostError, JobError
from volley.metrics import EVALUATION
from volley.objectives import best_of_k
from volley.objectives.tries import Terms
from volley.records import Group, Prompt, Scores, Verdict, VerdictStatus

MISTAKE = Verdict(
    VerdictStatus.INFRA_ERROR, None, detail="m:f raised KeyError: 'a' (line 3)", mistake="KeyError (line 3)"
)
AWAY = Verdict(VerdictStatus.INFRA_ERROR, None, detail="the judge is away")
PASSED = Verdict(VerdictStatus.PASSED, 1.0)

PROMPTS = [Prompt(f"p{i}", f"text {i}", {}, {"level": str(i % 2), "id": f"p{i}"}) for i in range(4)]
REWARDS = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], dtype=np.float64)
ANSWERS = np.array([[0, 1, 1, 0], [0, 1, 2, -1], [0, 0, 0, 0], [0, 1, 0, 2]], dtype=np.int32)
NO_RANKS = np.full_like(REWARDS, np.nan)

TOKENS, LOGPROBS = (8, 4, 12, 0), (-4.0, -1.0, -6.0, 0.0)


def summary(
    rows: Sequence[int],
    ks: Sequence[int],
    rewards: NDArray[np.float64] = REWARDS,
    answers: NDArray[np.int32] = ANSWERS,
    terms: Terms = (),
    ranks: NDArray[np.float64] = NO_RANKS,
) -> Evaluation:
    scores = [
        replace(Scores.pack([]), rewards_n=rewards[i], answers_n=answers[i], ranks_n=ranks[i])
        for i in range(len(rewards))
    ]
    sampled = [Sampled(scores[i], TOKENS[i], LOGPROBS[i]) for i in rows]
    return summarise([PROMPTS[i] for i in rows], sampled, ks, terms=terms, version=3, seed=1)


def test_the_figures_of_a_tag_value_cover_its_prompts_only() -> None:
    whole = summary(range(4), (1, 2, 4))
    assert [e.mean for e in whole.figures.estimates] == pytest.approx([0.4375, (5 / 6 + 0 + 1 + 0.5) / 4, 0.75])
    levels = {each.value: each.figures for each in whole.by_tag if each.tag == "level"}
    for value, rows in (("0", [0, 2]), ("1", [1, 3])):
        assert levels[value] == summary(rows, (1, 2, 4)).figures
    assert (levels["0"].prompts, levels["1"].distinct_answers) == (2, 3.0)
    assert json.loads(json.dumps(whole.row()))["by_tag"][0].keys() == {"tag", "value", *whole.figures.row()}
    assert {*whole.row()} == {*EVALUATION}


def test_length_and_entropy_are_means_over_all_tokens() -> None:
    figures = summary(range(4), (1,)).figures
    assert figures.length_mean == 24 / 16
    assert figures.entropy == pytest.approx(11 / 24)
    assert summary([3], (1,)).figures.entropy is None


def test_maj_at_k_is_the_mean_over_all_draws_of_k_votes() -> None:
    (estimate,) = summary([0], (3,)).figures.majority
    votes = []
    for draw in itertools.combinations(range(4), 3):
        answers = [int(ANSWERS[0, i]) for i in draw]
        most = max(answers.count(answer) for answer in answers)
        winners = {answer for answer in answers if answers.count(answer) == most}
        votes.append(np.mean([REWARDS[0, list(ANSWERS[0]).index(answer)] for answer in winners]))
    assert estimate.mean == pytest.approx(float(np.mean(votes)))


def test_weighted_means_are_those_of_the_curve() -> None:
    whole = summary(range(4), (1, 4), terms=((1, 0.5), (4, 1.5)))
    first, last = (each.mean for each in whole.figures.estimates)
    assert whole.figures.weighted is not None
    assert whole.figures.weighted.mean == pytest.approx(0.25 * first + 0.75 * last)
    assert whole.figures.weighted.low <= whole.figures.weighted.mean <= whole.figures.weighted.high
    first, last = (each.mean for each in whole.figures.majority)
    assert whole.figures.weighted_majority is not None
    assert whole.figures.weighted_majority.mean == pytest.approx(0.25 * first + 0.75 * last)
    row = json.loads(json.dumps(whole.row()))
    assert row["weights"] == {"1": 0.5, "4": 1.5}
    assert row["by_tag"][0]["weighted"].keys() == {"mean", "low", "high"}
    values = evaluation_row(row, now=0.0).values
    assert values["weighted_pass_at_k"] == row["weighted"]["mean"]
    assert values["weighted_maj_at_k"] == row["weighted_majority"]["mean"]
    assert not [name for name in values if name.startswith(("weights", "weighted/"))]
    assert evaluation_words(row).endswith(f"weighted {row['weighted']['mean']:.3f}")


def test_the_best_by_rank_is_estimated_if_every_sample_has_one() -> None:
    ranked = REWARDS[::-1].copy()  # ranks of another prompt: as good as unrelated
    whole = summary(range(4), (1, 2), ranks=ranked, terms=((2, 1.0),))
    assert [each.mean for each in whole.figures.picked] == [
        pytest.approx(float(np.mean(best_of_k(REWARDS, ranked, k)))) for k in (1, 2)
    ]
    assert whole.figures.weighted_picked is not None
    assert whole.figures.weighted_picked.mean == whole.figures.picked[1].mean
    values = evaluation_row(whole.row(), now=0.0).values
    assert values["best_of_2"] == values["weighted_best_of_k"] == whole.figures.picked[1].mean
    ranked[2, 3] = np.nan
    assert summary(range(4), (1, 2), ranks=ranked).figures.picked == ()


def test_without_weights_or_answers_there_is_no_weighted_mean() -> None:
    plain = summary(range(4), (1, 4))
    assert (plain.figures.weighted, plain.figures.weighted_majority, plain.row()["weights"]) == (None, None, None)
    assert "weighted" not in evaluation_words(plain.row())
    silent = summary(range(4), (1, 4), answers=np.full_like(ANSWERS, -1), terms=((2, 1.0),))
    assert silent.figures.weighted is not None
    assert silent.figures.weighted_majority is None


def test_there_is_no_majority_without_answers_or_if_one_answer_has_two_rewards() -> None:
    none, one = np.full_like(ANSWERS, -1), np.zeros_like(ANSWERS)
    assert summary(range(4), (1,), answers=none).figures.majority == ()
    assert summary(range(4), (1,), answers=none).figures.distinct_answers is None
    assert summary(range(4), (1,), answers=one).figures.majority == ()


def test_a_tag_with_a_value_per_prompt_has_no_breakdown() -> None:
    many = [Prompt(str(i), "x", {}, {"id": str(i)}) for i in range(65)]
    assert tag_values(many) == []
    assert len(tag_values(many[:64])) == 64


def group(n: int) -> Group:
    return Group(
        group_id=-1,
        prompt_id="p",
        prompt_p=np.zeros(1, np.int32),
        tokens_T=np.zeros(n, np.int32),
        logprobs_T=np.linspace(-0.1, -0.2, n, dtype=np.float32),
        versions_T=np.zeros(n, np.int32),
        lengths_n=np.ones(n, np.int32),
        stopped_n=np.ones(n, np.bool_),
        texts=tuple(f"sample {i}" for i in range(n)),
        actor="actor-0",
        seconds=0.1,
    )


def test_complete_prompts_are_recovered_and_the_rows_of_others_are_removed(tmp_path: Path) -> None:
    log = SampleLog(RunFolder(tmp_path))
    scores = Scores.pack([Verdict(VerdictStatus.PASSED, 1.0, answer="7"), Verdict(VerdictStatus.WRONG_ANSWER, 0.0)])
    assert log.recover(PROMPTS, 2) == {}
    for index in (0, 2):
        log.write(index, PROMPTS[index], group(2), scores)
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    log.write(3, PROMPTS[3], group(2), scores)
    longer = path.read_bytes()
    for cut in range(len(whole), len(longer)):  # wherever the interruption was
        path.write_bytes(longer[:cut])
        known = log.recover(PROMPTS, 2)
        assert known.keys() == {"p0", "p2"}
        assert path.read_bytes() == whole
    assert known["p0"].scores.rewards_n.tolist() == [1.0, 0.0]
    assert known["p0"].scores.answers_n.tolist() == [0, -1]
    assert known["p0"].tokens == 2
    assert known["p0"].logprob == pytest.approx(-0.3)
    changed = [Prompt("p0", "another text"), PROMPTS[2]]
    assert log.recover(changed, 2).keys() == {"p2"}


@pytest.mark.parametrize(
    ("verdicts", "kind", "told"),
    [
        ([[MISTAKE, MISTAKE], [MISTAKE, MISTAKE]], JobError, r"no sample of the evaluation's 2 prompts.*\(line 3\)"),
        ([[MISTAKE, MISTAKE], [PASSED, MISTAKE]], HostError, r"samples of 2 prompts could not be scored: m:f raised"),
        ([[AWAY, AWAY], [PASSED, PASSED]], HostError, r"samples of 1 prompts could not be scored: the judge is away"),
        ([[AWAY, AWAY], [MISTAKE, MISTAKE]], HostError, "samples of 2 prompts could not be scored"),
    ],
)
def test_an_evaluation_with_unscored_samples_is_none(
    verdicts: list[list[Verdict]], kind: type[Exception], told: str
) -> None:
    """Another driver may get further, unless the function is broken."""
    sampled = [Sampled(Scores.pack(row), 0, 0.0) for row in verdicts]
    with pytest.raises(kind, match=told):
        evaluation_of(PROMPTS[:2], sampled, [1], version=0, seed=0)
