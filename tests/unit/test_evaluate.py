"""What an evaluation computes from its samples, and the samples on disk that a resumed run finds."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.gateway.groups import EpisodeReport
from services.coordinator.episode_figures import EpisodeFigures
from services.coordinator.schedule import group_seed
from services.coordinator.turns import MadeGroup
from services.data.tokens import EncodedPrompt
from services.evaluation import evaluate
from services.evaluation.estimates import Evaluation, Sampled, summarise, tag_values
from services.evaluation.evaluate import Sampler, unscored_problem
from services.evaluation.sample_log import SampleLog
from services.recording.display import evaluation_words
from services.recording.sinks.base import evaluation_row
from services.store.folder import RunFolder
from volley.errors import HostError, JobError
from volley.metrics import EVALUATION
from volley.objectives import best_of_k
from volley.objectives.tries import Terms
from volley.records import Group, ModelCall, Prompt, Scores, Verdict, VerdictStatus
from volley.sampling import EvalSampling

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


def test_neighbouring_prompts_share_no_random_numbers() -> None:
    """The engine gives sample j of a request the seed of the request plus j."""
    used = [group_seed(3, index, 1) + j for index in range(500) for j in range(256)]
    assert len({*used}) == len(used)


def test_the_figures_of_a_tag_value_cover_its_prompts_only() -> None:
    whole = summary(range(4), (1, 2, 4))
    assert [e.mean for e in whole.figures.estimates] == pytest.approx([0.4375, (5 / 6 + 0 + 1 + 0.5) / 4, 0.75])
    levels = {each.value: each.figures for each in whole.by_tag if each.tag == "level"}
    for value, rows in (("0", [0, 2]), ("1", [1, 3])):
        assert levels[value] == summary(rows, (1, 2, 4)).figures
    assert (levels["0"].prompts, levels["1"].distinct_answers) == (2, 3.0)
    assert json.loads(json.dumps(whole.row()))["by_tag"][0].keys() == {"tag", "value", *whole.figures.row()}
    assert {*whole.row()} == {*EVALUATION}


def test_unscored_samples_are_left_out_and_counted() -> None:
    rewards = REWARDS.copy()
    rewards[0, 1] = rewards[1, :3] = rewards[2, :] = np.nan  # 3, 1, 0 and 4 scored samples
    whole = summary(range(4), (1, 2, 3, 4), rewards, terms=((1, 1.0), (2, 1.0)))
    scored = [row[~np.isnan(row)] for row in rewards]
    for estimate in whole.figures.estimates:
        k = estimate.k
        drawn = [[max(draw) for draw in itertools.combinations(row, k)] for row in scored if len(row) >= k]
        assert estimate.mean == pytest.approx(float(np.mean([np.mean(each) for each in drawn])))
        assert estimate.left_out == 4 - len(drawn)
    assert [each.left_out for each in whole.figures.estimates] == [1, 2, 2, 3]
    assert whole.figures.unscored == whole.row()["unscored"] == 1 + 3 + 4
    assert whole.figures.weighted is not None
    at = {k: [np.mean([max(draw) for draw in itertools.combinations(scored[i], k)]) for i in (0, 3)] for k in (1, 2)}
    assert whole.figures.weighted.mean == pytest.approx(float(np.mean([at[1], at[2]])))
    levels = {each.value: each.figures for each in whole.by_tag if each.tag == "level"}
    assert (levels["0"].unscored, levels["1"].unscored) == (5, 3)
    assert [each.k for each in levels["0"].estimates] == [1, 2, 3]  # no prompt of level 0 has four scored samples
    assert "(8 samples unscored)" in evaluation_words(whole.row())


def test_votes_and_ranks_of_unscored_samples_do_not_count() -> None:
    rewards, answers = np.array([[1.0, np.nan, 0.0, 1.0]]), np.array([[0, 0, 1, 0]], dtype=np.int32)
    ranks = np.array([[3.0, np.nan, 1.0, 2.0]])
    whole = summary([0], (1, 3), rewards, answers, ranks=ranks)
    assert [each.mean for each in whole.figures.majority] == pytest.approx([2 / 3, 1.0])
    assert [each.mean for each in whole.figures.picked] == pytest.approx([2 / 3, 1.0])


def test_what_could_not_be_scored_is_reported() -> None:
    def sampled(*rewards: float | None) -> Sampled:
        verdicts = [
            Verdict(VerdictStatus.INFRA_ERROR, None, detail="boom")
            if reward is None
            else Verdict(VerdictStatus.PASSED, reward)
            for reward in rewards
        ]
        return Sampled(Scores.pack(verdicts), 1, 0.0)

    assert unscored_problem([sampled(1.0, 0.0)]) == ""
    assert unscored_problem([sampled(1.0, None), sampled(None, 0.0)]) == (
        "2 of 4 samples could not be scored and are left out, the first because: boom"
    )
    with pytest.raises(HostError, match=r"none of the 2 samples .* boom"):
        unscored_problem([sampled(None, None)])


def test_length_and_entropy_are_means_over_all_tokens() -> None:
    figures = summary(range(4), (1,)).figures
    assert figures.length_mean == 24 / 16
    assert figures.entropy == pytest.approx(11 / 24)
    assert summary([3], (1,)).figures.entropy is None


def test_calls_are_those_of_episodes_overall_and_by_tag(tmp_path: Path) -> None:
    log = SampleLog(RunFolder(tmp_path))
    prompts = [Prompt("a", "?", tags={"of": "1"}), Prompt("b", "?", tags={"of": "2"})]
    scores = Scores.pack([Verdict(VerdictStatus.PASSED, 1.0), Verdict(VerdictStatus.PASSED, 1.0)])
    call = ModelCall("", "7", observed=0, tokens=1, seconds=0.1)
    for index, calls in enumerate((((call,), (call, call)), ((call, call, call), (call, call, call)))):
        made = [len(each) + index for each in calls]  # with those that `on_rewrite: keep_longest` left out
        log.write(index, prompts[index], replace(group(2), calls=calls), scores, made)
    known = log.recover(prompts, 2)
    found = summarise(prompts, [known["a"], known["b"]], (1,), version=0, seed=0)
    assert found.figures.calls_mean == 11 / 4
    assert [each.figures.calls_mean for each in found.by_tag] == [1.5, 4.0]
    assert summary(range(4), (1,)).figures.calls_mean is None, "no program made these"


async def test_a_resumed_evaluation_has_the_calls_that_the_first_driver_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are not in the record of an episode, which keeps the longest conversation."""
    call, scores = ModelCall("", "7", observed=0, tokens=1, seconds=0.1), Scores.pack([PASSED, PASSED])
    reports = (EpisodeReport(end=None, calls=5, observed=0), EpisodeReport(end=None, calls=1, observed=0))
    figures = EpisodeFigures("actor-0", "environment-0", 0.0, 0.0, (1.0, 1.0), ("", ""), reports)
    kept = replace(group(2), calls=((call, call), (call,)))

    async def make_samples(*_: object, **__: object) -> MadeGroup:
        reference: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        reference.set_result(kept)
        return MadeGroup(reference, kept.meta(), scores, (0.0, 1.0), figures)

    async def write(*scored: Any) -> None:
        log.write(*scored)

    monkeypatch.setattr(evaluate, "make_samples", make_samples)
    log, prompt = SampleLog(RunFolder(tmp_path)), Prompt("a", "?")
    unused: Any = None
    sampler = Sampler(unused, unused, EvalSampling(n=2), max_in_flight=1, seed=0)
    (first,) = await sampler.sample([EncodedPrompt(prompt, np.zeros(1, np.int32))], on_scored=write)
    assert first.calls == log.recover([prompt], 2)["a"].calls == 6
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept_only = [{name: value for name, value in row.items() if name != "calls_made"} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept_only))
    assert log.recover([prompt], 2)["a"].calls == 3, "rows without the number have their calls"


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
        ([[AWAY, AWAY], [MISTAKE, MISTAKE]], HostError, "none of the 4 samples of an evaluation could be scored"),
    ],
)
def test_an_evaluation_without_a_scored_sample_is_none(
    verdicts: list[list[Verdict]], kind: type[Exception], told: str
) -> None:
    """Another driver may get further, unless the function is broken."""
    with pytest.raises(kind, match=told):
        unscored_problem([Sampled(Scores.pack(row), 0, 0.0) for row in verdicts])


def test_a_mistake_on_some_rows_leaves_out_their_samples() -> None:
    sampled = [Sampled(Scores.pack(row), 0, 0.0) for row in ([MISTAKE, MISTAKE], [PASSED, MISTAKE])]
    assert unscored_problem(sampled).startswith(
        "3 of 4 samples could not be scored and are left out, the first because"
    )
