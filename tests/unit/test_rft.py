"""Rejection sampling: which samples are kept, what is trained on, and what a resumed run finds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from learner.batch import sft_pieces
from learner.layout import Piece, micro_batches
from services.data.tokens import EncodedPrompt
from services.evaluation.rejection import Kept, counts, keep
from services.evaluation.sample_log import SampleLog, group_rows
from services.jobs.needs import needs_of, phases_of
from services.runs.driver import _resume_point
from services.runs.rft import plan_of
from services.store.desired import change
from services.store.folder import RunFolder
from volley.errors import HostError, JobError
from volley.job import JOB, RFTJob
from volley.records import Group, ModelCall, Prompt, Scores, Verdict, VerdictStatus
from volley.state import Desired

PROMPTS = [
    EncodedPrompt(Prompt(f"p{i}", f"text {i}", {}, {"level": str(i % 2)}), np.array([1, 10 + i], np.int32))
    for i in range(3)
]


def rft(**changes: Any) -> RFTJob:
    tree = {
        "kind": "rft",
        "name": "kept",
        "model": {"path": "nowhere"},
        "data": {"path": "nowhere.jsonl"},
        "scorer": {"kind": "exact"},
        "steps": 3,
        **changes,
    }
    job = JOB.validate_python({key: value for key, value in tree.items() if value is not None})
    assert isinstance(job, RFTJob)
    return job


def drawn(prompt: int, text: str, reward: float | None, token_ids: tuple[int, ...] = (5, 2)) -> dict[str, Any]:
    return {"prompt_id": f"p{prompt}", "sample": text, "reward": reward, "token_ids": list(token_ids)}


def kept_texts(rows: list[dict[str, Any]], *, per_prompt: int = 9, correct_from: float = 1.0) -> list[tuple[str, str]]:
    kept = keep(rows, PROMPTS, per_prompt=per_prompt, correct_from=correct_from)
    return [(sample.prompt.prompt.id, sample.text) for sample in kept.samples]


def test_a_text_is_kept_once_per_prompt() -> None:
    rows = [drawn(0, "a", 1.0, (5,)), drawn(0, "a", 1.0, (6, 2)), drawn(0, "b", 1.0), drawn(1, "a", 1.0)]
    assert kept_texts(rows) == [("p0", "a"), ("p0", "b"), ("p1", "a")]
    first = keep(rows, PROMPTS, per_prompt=9, correct_from=1.0).samples[0]
    assert first.tokens.answer_a.tolist() == [5]


def test_the_first_samples_of_a_prompt_are_kept_up_to_the_limit() -> None:
    rows = [drawn(0, text, 1.0) for text in "abcd"] + [drawn(1, "x", 1.0)]
    assert kept_texts(rows, per_prompt=2) == [("p0", "a"), ("p0", "b"), ("p1", "x")]
    assert keep(rows, PROMPTS, per_prompt=2, correct_from=1.0).correct == 5


def test_a_sample_at_the_threshold_is_correct() -> None:
    rows = [drawn(0, "low", 0.49), drawn(0, "at", 0.5), drawn(0, "over", 0.75)]
    assert kept_texts(rows, correct_from=0.5) == [("p0", "at"), ("p0", "over")]


def test_an_unscored_sample_is_never_correct_whatever_the_threshold() -> None:
    rows = [drawn(0, "lost", None), drawn(0, "bad", -3.0)]
    assert kept_texts(rows, correct_from=-1e9) == [("p0", "bad")]
    assert keep(rows, PROMPTS, per_prompt=1, correct_from=-1e9).unscored == 1


def test_kept_samples_are_in_the_order_of_the_prompts_however_they_finished() -> None:
    rows = [drawn(2, "c", 1.0), drawn(0, "b", 1.0), drawn(0, "a", 1.0)]
    assert kept_texts(rows) == [("p0", "b"), ("p0", "a"), ("p2", "c")]


def test_no_correct_sample_is_a_job_error_and_no_scored_sample_a_host_error() -> None:
    with pytest.raises(JobError, match=r"no sample was correct: of 2 samples of 3 prompts the best earned 0\.5"):
        keep([drawn(0, "a", 0.5), drawn(1, "b", 0.0)], PROMPTS, per_prompt=4, correct_from=1.0)
    with pytest.raises(JobError, match="and 1 could not be scored"):
        keep([drawn(0, "a", 0.5), drawn(1, "b", None)], PROMPTS, per_prompt=4, correct_from=1.0)
    with pytest.raises(HostError, match="none of 1 samples could be scored"):
        keep([drawn(0, "a", None)], PROMPTS, per_prompt=4, correct_from=1.0)


def test_kept_samples_are_counted_by_tag() -> None:
    rows = [drawn(0, "a", 1.0), drawn(0, "b", 1.0), drawn(1, "c", 0.0), drawn(2, "d", None)]
    numbers = counts(keep(rows, PROMPTS, per_prompt=4, correct_from=1.0), [each.prompt for each in PROMPTS])
    assert numbers == {
        "samples": 4,
        "samples_correct": 2,
        "samples_unscored": 1,
        "samples_kept": 2,
        "prompts": 3,
        "prompts_kept": 1,
        "by_tag": [
            {"tag": "level", "value": "0", "prompts": 2, "prompts_kept": 1, "samples_kept": 2},
            {"tag": "level", "value": "1", "prompts": 1, "prompts_kept": 0, "samples_kept": 0},
        ],
    }
    assert json.loads(json.dumps(numbers)) == numbers


def kept_of(count: int) -> Kept:
    return keep(
        [drawn(i % 3, str(i), 1.0, (i, i + 1)) for i in range(count)], PROMPTS, per_prompt=count, correct_from=1.0
    )


def test_training_uses_the_tokens_that_were_sampled() -> None:
    plan = plan_of(rft(), kept_of(4))
    tokens = {(tuple(row.prompt_p.tolist()), tuple(row.answer_a.tolist())) for row in plan.rows}
    assert tokens == {((1, 10), (0, 1)), ((1, 10), (3, 4)), ((1, 11), (1, 2)), ((1, 12), (2, 3))}


def episodes() -> Group:
    """Two episodes behind the prompt 7 8 9. The second call of the first comes behind the observed 40 41."""
    calls = (ModelCall("p", "one", 3, 2, 0.1), ModelCall("more", "two", 2, 1, 0.1)), (ModelCall("p", "two", 3, 2, 0.1),)
    return Group(
        group_id=-1,
        prompt_id="p1",
        prompt_p=np.array([7, 8, 9], np.int32),
        tokens_T=np.array([20, 2, 30, 30, 2], np.int32),
        logprobs_T=np.zeros(5, np.float32),
        versions_T=np.zeros(5, np.int32),
        lengths_n=np.array([3, 2], np.int32),
        stopped_n=np.array([False, True]),
        texts=("two", "two"),
        actor="actor-0",
        seconds=1.0,
        observation_S=np.array([40, 41], np.int32),
        observation_at_S=np.array([2, 2], np.int32),
        calls=calls,
    )


def test_episodes_are_trained_on_as_they_were_recorded_and_told_apart_by_all_answers() -> None:
    passed = Scores.pack([Verdict(VerdictStatus.PASSED, 1.0)] * 2)
    rows = json.loads(json.dumps(group_rows(0, PROMPTS[1].prompt, episodes(), passed, token_ids=True)))
    kept = keep(rows + rows, PROMPTS, per_prompt=9, correct_from=1.0)
    assert [sample.text for sample in kept.samples] == ["two", "two"]
    assert [len(sample.row()["calls"]) for sample in kept.samples] == [2, 1]
    first, second = (layout(piece) for piece in sft_pieces(plan_of(rft(), kept).rows))
    assert first == ([7, 8, 9, 20, 2, 40, 41, 30], [20, 2, 30])
    assert second == ([7, 8, 9, 30, 2], [30, 2])


def layout(piece: Piece) -> tuple[list[int], list[int]]:
    """A row's ids in the model, and those that the loss predicts."""
    (batch,) = micro_batches([piece], 100, width=1, allow_shared=False)
    return batch.ids_RL[0].tolist(), batch.ids_RL[0][batch.at_T + 1].tolist()


def test_programs_in_an_rft_job() -> None:
    program = {"kind": "program", "target": "agents:solve"}
    job = rft(rollout=program, scorer=None, environment_workers={"count": 2, "cpus": 0.5})
    sampling, training = phases_of(job)
    assert sampling.cpus - phases_of(rft())[0].cpus == pytest.approx(2 * 0.5 - job.reward_workers.cpus)
    assert training.cpus == phases_of(rft())[1].cpus
    with pytest.raises(ValidationError, match="turns"):
        rft(turns={"max_count": 2})


@pytest.mark.parametrize(
    ("changes", "count", "expected"),
    [
        ({"rows_per_step": 4}, 10, (3, 4)),
        ({"steps": None, "passes": 1, "rows_per_step": 4}, 10, (3, 4)),
        ({"steps": None, "passes": 2, "rows_per_step": 4}, 10, (5, 4)),
        (
            {"steps": None, "passes": 2, "rows_per_step": 128},
            10,
            (2, 10),
        ),  # a pass has at least one step, however few samples were kept
        ({"steps": None, "passes": 3, "learner": {"ranks": 4}}, 2, (2, 4)),
    ],
)
def test_steps_and_batch_size_follow_from_the_job_and_the_kept_samples(
    changes: dict[str, Any], count: int, expected: tuple[int, int]
) -> None:
    plan = plan_of(rft(**changes), kept_of(count))
    assert (plan.steps, plan.rows_per_step) == expected
    met = [id(row) for step in range(plan.steps) for row in plan.batch(step)][:count]
    assert len(set(met)) == count  # the first pass contains every row once


@pytest.mark.parametrize("changes", [{"steps": None}, {"passes": 2}])
def test_a_job_has_exactly_one_of_steps_and_passes(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="set exactly one of steps and passes"):
        rft(**changes)


def test_the_two_phases_never_need_their_resources_together() -> None:
    job = rft(
        actors={"count": 3, "gpus": 1, "resources": {"fast": 1}},
        learner={"ranks": 2, "gpus_per_rank": 1, "resources_per_rank": {"fast": 2, "big": 1}},
    )
    sampling, training = phases_of(job)
    assert (sampling.gpus, training.gpus, needs_of(job).gpus) == (3, 2, 3)
    assert needs_of(job).custom == {"big": 2, "fast": 4}
    assert needs_of(job).memory_bytes == max(sampling.memory_bytes, training.memory_bytes)


def test_a_live_run_can_be_stopped_but_not_steered() -> None:
    assert change(Desired(), rft(), {"stopped": True}).stopped
    with pytest.raises(JobError, match="actors: does not apply to a job of kind rft"):
        change(Desired(), rft(), {"actors": 2})


def group(prompt: int) -> Group:
    return Group(
        group_id=-1,
        prompt_id=f"p{prompt}",
        prompt_p=np.zeros(1, np.int32),
        tokens_T=np.array([7, 8, 2, 9], np.int32),
        logprobs_T=np.zeros(4, np.float32),
        versions_T=np.zeros(4, np.int32),
        lengths_n=np.array([3, 1], np.int32),
        stopped_n=np.array([True, False]),
        texts=("ab", "c"),
        actor="actor-0",
        seconds=0.1,
    )


def test_another_driver_reads_every_sample_with_its_tokens(tmp_path: Path) -> None:
    job = rft()
    folder = RunFolder.create(tmp_path, job)
    log, prompts = SampleLog(folder, token_ids=True), [each.prompt for each in PROMPTS]
    right, lost = Verdict(VerdictStatus.PASSED, 1.0), Verdict(VerdictStatus.INFRA_ERROR, None)
    log.write(0, prompts[0], group(0), Scores.pack([right, right]))
    log.write(1, prompts[1], group(1), Scores.pack([right, lost]))
    folder.append("metrics", [{"step": 0}])
    assert _resume_point(job, folder) is None
    assert [row["token_ids"] for row in log.rows()] == [[7, 8, 2], [9]] * 2
    assert log.recover(prompts, 2, unscored=True).keys() == {"p0", "p1"}
    folder.rewind(0, samples=False)
    assert (folder.read("metrics"), len(folder.read("samples"))) == ([], 4)
    assert log.recover(prompts, 2).keys() == {"p0"}  # unscored samples are drawn again
    assert len(folder.read("samples")) == 2
