"""The table of metrics has exactly the metrics that steps emit."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.config import ActorUpdate, BroadcastReport
from actors.gateway.groups import EpisodeReport
from environments.records import Usage
from learner.batch import Packer, sft_pieces
from learner.metrics import batch_metrics
from learner.policy import Policy
from learner.records import SFTRow, StepReport
from learner.supervised import supervised_step
from services.coordinator.episode_figures import EpisodeFigures
from services.coordinator.ledger import Ledger
from services.coordinator.records import Batch, EpisodesOfStep, FinishedStep, ReadyGroup, StepTimes
from services.recording.progress import Progress
from services.recording.recorder import step_row
from tests.plain_engine import PlainEngine
from tests.refs import NOT_STORED
from tests.unit.learner.conftest import tiny_lm
from tests.unit.learner.reinforcers import REWARDS, batch_of, groups_of, reinforcer, step
from tests.unit.learner.test_value import critic_of
from volley.metrics import METRICS, family, page
from volley.objectives import MaxAtK, Mean
from volley.records import STATUSES, Prompt, Scores, Verdict, VerdictStatus
from volley.update import KLPenalty, Optimizer, PolicyUpdate, SequenceCorrection, ValueModel


@pytest.fixture(scope="module")
def reinforced() -> set[str]:
    """Metric names of reinforcement steps, collected over jobs that use every option."""
    lm = tiny_lm()
    penalty = KLPenalty(coefficient=0.1, target=1.0)
    weighed = PolicyUpdate(behaviour_correction=SequenceCorrection(), off_policy_mask=0.5, kl=penalty)
    companions = MaxAtK(k=2, companion_weights="exact")
    valued = PolicyUpdate(value_model=ValueModel())
    critic, _ = critic_of(tiny_lm(), ValueModel())
    reports = [
        step(reinforcer(lm, weighed, reference=lm)[0], batch_of(groups_of(), weighed), companions)[0],
        step(reinforcer(lm, valued, critic=critic)[0], batch_of(groups_of(), valued), Mean())[0],
        step(reinforcer(lm, PolicyUpdate())[0], batch_of(groups_of(), PolicyUpdate()), Mean(focal=1.0))[0],
    ]
    return {name for metrics in reports for name in row(metrics)}


def row(metrics: dict[str, float]) -> Iterable[str]:
    """The row of a step as the recorder writes it."""
    every = (*STATUSES, VerdictStatus.PASSED)
    verdicts = [Verdict(each, 1.0 if each.bears_reward else None, answer="7") for each in every]
    prompts = {group.prompt_id: Prompt(group.prompt_id, "", tags={"level": "5"}) for group in groups_of()}
    ready = tuple(
        ReadyGroup(NOT_STORED, meta, prompts[meta.prompt_id], Scores.pack(verdicts), 1, (0.0, 1.0), 2.0)
        for meta in (replace(group.meta(), turns=9) for group in groups_of())
    )
    batch = batch_of(groups_of(), PolicyUpdate())
    made = Batch(ready, replaced=ready[:1])
    report = StepReport({**batch_metrics(batch.scored, (1, 2, 4)), **metrics}, {0: 3})
    # The coordinator adds these, and the figures of a refill.
    checked = {"served_mismatch_max": 1e-6, "seconds_hand_over": 0.1}
    report = replace(report, metrics={**report.metrics, **checked, **made.figures(report)})
    broadcast = BroadcastReport(1, (ActorUpdate("actor-0", 1, 10, 0.1, 0.1, 0.1),), 0.1)
    times = StepTimes(0.0, 1.0, 2.0, 2.0, 2.5, 3.0)
    report_of_episode = EpisodeReport(None, 2, 5, calling=((0.5, 1.0),), calling_seconds=0.5)
    ends = ("raised", "timeout", "no_call", "rewritten", "lost", "calls", "tokens", "context")
    reports, tool_errors = (report_of_episode,) * 8, (1,) * 8
    figures = EpisodeFigures("actor-0", "environment-0", 0.0, 0.0, (1.0,) * 8, ends, reports, tool_errors)
    episodes = EpisodesOfStep((figures,), Usage(8, 8.0, 16.0))
    finished = FinishedStep(0, made, report, broadcast, times, 10, Ledger().counts(), episodes)
    return step_row(finished, Progress([*prompts.values()]), seconds=1.0)


@pytest.fixture(scope="module")
def supervised() -> set[str]:
    engine: Any = PlainEngine(Policy(tiny_lm(), 1.0), Optimizer())
    rows = [SFTRow(np.array([3, 4], np.int32), np.array([5, 6], np.int32))]
    metrics = supervised_step(engine, Packer(100, 32, True, engine.device), sft_pieces(rows), 0)
    return {"step", "time", *metrics, "seconds_step"}


def test_every_name_is_defined_and_every_definition_is_used(reinforced: set[str], supervised: set[str]) -> None:
    undefined = {name for name in reinforced | supervised if family(name) is None}
    assert not undefined
    assert {family(name) for name in reinforced} == METRICS.keys()
    assert {name for name, metric in METRICS.items() if "supervised" in metric.when} == supervised


def test_names_belong_to_metric_families() -> None:
    assert family("pass_at_16") == "pass_at_<k>"
    assert family("verdict_wrong_answer") == "verdict_<status>"
    assert family("pass_at_") is None
    assert family("losses") is None
    assert len(REWARDS) == len(groups_of())


def test_the_page_shows_the_table() -> None:
    written = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert written == page(), "write it again: python -m volley.metrics > docs/metrics.md"
