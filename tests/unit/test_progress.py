"""The figures of a step's row by tag, and the prompts solved so far."""

from typing import Any

import numpy as np
import pytest

from services.coordinator.records import ReadyGroup
from services.recording.progress import Progress
from tests.refs import NOT_STORED
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus

PROMPTS = [Prompt(f"p{i}", "", tags={"level": str(1 + i % 2), "id": f"{i}"}) for i in range(20)]
PASSED, FAILED = Verdict(VerdictStatus.PASSED, 1.0, answer="a"), Verdict(VerdictStatus.WRONG_ANSWER, 0.0, answer="b")
UNSCORED = Verdict(VerdictStatus.INFRA_ERROR, None)


def ready(prompt: int, *verdicts: Verdict, tokens: int = 6) -> ReadyGroup:
    meta = GroupMeta(0, f"p{prompt}", "actor-0", len(verdicts), 3, tokens, -0.5 * tokens, 0, 0, 0, 0.1, len(verdicts))
    return ReadyGroup(NOT_STORED, meta, PROMPTS[prompt], Scores.pack(verdicts), 1, (0.0, 1.0), 2.0)


def test_a_solved_prompt_stays_solved() -> None:
    progress = Progress(PROMPTS)
    first = progress.add([ready(0, PASSED, FAILED), ready(1, FAILED, FAILED)])
    assert (first["prompts_met"], first["prompts_solved"], first["cumulative_solve_rate"]) == (2, 1, 0.5)
    assert first["cumulative_solve_rate_by_tag"] == {"level/1": 1.0, "level/2": 0.0}
    second = progress.add([ready(0, FAILED, FAILED), ready(2, FAILED, FAILED)])
    assert (second["prompts_met"], second["prompts_solved"]) == (3, 1)
    assert second["cumulative_solve_rate_by_tag"] == {"level/1": 0.5, "level/2": 0.0}
    assert second["reward_mean_by_tag"] == {"level/1": 0.0}


def test_the_figures_of_a_tag_value_cover_its_groups_only() -> None:
    row = Progress(PROMPTS).add([ready(0, PASSED, FAILED, tokens=8), ready(1, UNSCORED, FAILED, tokens=2)])
    assert row["length_mean"] == 10 / 4
    assert row["length_mean_by_tag"] == {"level/1": 4.0, "level/2": 1.0}
    assert row["distinct_answers"] == 1.5
    assert row["distinct_answers_by_tag"] == {"level/1": 2.0, "level/2": 1.0}
    assert row["reward_mean_by_tag"] == {"level/1": 0.5, "level/2": 0.0}
    assert row["entropy_by_tag"] == {"level/1": pytest.approx(0.5), "level/2": pytest.approx(0.5)}


def test_a_resumed_run_knows_which_prompts_were_solved() -> None:
    ledger: list[dict[str, Any]] = [
        {"step": 0, "group": 0, "prompt_id": "p0", "passed": 2, "end": "trained"},
        {"step": 0, "group": 1, "prompt_id": "p1", "passed": 0, "end": "trained"},
        {"step": 0, "group": 2, "prompt_id": "p2", "end": "dropped: 0 of 2 samples could be scored"},
    ]
    progress = Progress(PROMPTS)
    progress.add([ready(5, PASSED, PASSED)])  # by an earlier process, and done again now
    progress.restore(ledger)
    row = progress.add([ready(3, PASSED, FAILED)])
    assert (row["prompts_met"], row["prompts_solved"]) == (3, 2)


def test_rows_without_tags_or_answers_lack_those_columns() -> None:
    meta = GroupMeta(0, "x", "actor-0", 2, 3, 0, 0.0, 0, 0, 0, 0.1, 2)
    verdicts = [Verdict(VerdictStatus.PASSED, 1.0)] * 2
    group = ReadyGroup(NOT_STORED, meta, Prompt("x", ""), Scores.pack(verdicts), 1, (0.0, 1.0), 2.0)
    row = Progress([Prompt("x", "")]).add([group])
    assert row.keys() == {"length_mean", "prompts_met", "prompts_solved", "cumulative_solve_rate"}
    assert np.isclose(row["cumulative_solve_rate"], 1.0)
