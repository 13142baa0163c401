"""The timeline of a step has a bounded number of spans, which still show when each process was busy."""

import pytest

from actors.config import BroadcastReport
from actors.gateway.groups import EpisodeReport
from environments.records import Usage
from learner.records import StepReport
from services.coordinator.episode_figures import EpisodeFigures
from services.coordinator.records import Batch, EpisodesOfStep, FinishedStep, StepTimes
from services.recording.timeline import MAX_PROCESSES, MAX_SPANS, Span, bounded, timeline


def covered(spans: list[Span], process: str) -> float:
    """How many seconds the process was busy."""
    done, until = 0.0, float("-inf")
    for _, _, start, end in sorted((span for span in spans if span[0] == process), key=lambda span: span[2]):
        done += max(0.0, end - max(start, until))
        until = max(until, end)
    return done


def test_the_spans_of_a_small_step_are_unchanged() -> None:
    spans: list[Span] = [("actor-0", "generate", 0.0, 1.0), ("actor-0", "generate", 0.5, 2.0)]
    assert bounded(spans) == spans


@pytest.mark.parametrize("actors", [1, 8, 50])
def test_the_spans_of_a_large_step_are_merged_per_process(actors: int) -> None:
    groups = [i / 100 for i in range(4096)]
    spans: list[Span] = [("learner", "learn", 41.0, 44.0)]
    for i, at in enumerate(groups):
        spans.append((f"actor-{i % actors}", "generate", at, at + 3.0))
        spans.append((f"reward-{i % 4}", "score", at + 3.0, at + 3.03))
    shown = bounded(spans)
    assert len(shown) <= MAX_SPANS
    assert ("learner", "learn", 41.0, 44.0) in shown
    for process in ("actor-0", "learner"):
        assert covered(shown, process) == pytest.approx(covered(spans, process), rel=0.02)
    assert covered(shown, "reward-0") >= covered(spans, "reward-0")


def test_processes_beyond_the_limit_are_left_out() -> None:
    spans: list[Span] = [("learner", "learn", 0.0, 1.0)]
    spans += [(f"actor-{i}", "generate", float(j), j + 0.5) for i in range(1000) for j in range(8)]
    shown = bounded(spans)
    assert len(shown) <= MAX_SPANS
    assert len({process for process, *_ in shown}) == MAX_PROCESSES + 1


def test_actors_and_environments_of_episodes_work_in_turn() -> None:
    report = EpisodeReport(None, 2, 5, calling=((0.0, 1.0), (3.0, 4.0)), calling_seconds=2.0)
    figures = EpisodeFigures("actor-0", "environment-0", 10.0, 10.0, (5.0,), ("",), (report,))
    lost = EpisodeFigures("actor-0", "", 10.0, 10.0, (0.0,), ("lost",), (EpisodeReport(None, 0, 0),))
    finished = FinishedStep(
        0,
        Batch(()),
        StepReport({}, {}),
        BroadcastReport(1, (), 0.0),
        StepTimes(0.0, 1.0, 2.0, 2.0, 3.0, 4.0),
        0,
        {},
        EpisodesOfStep((figures, lost), Usage()),
    )
    spans = [tuple(span) for span in timeline(finished)["spans"] if span[0] != "learner"]
    assert spans == [
        ("actor-0", "generate", 10.0, 11.0),
        ("actor-0", "generate", 13.0, 14.0),
        ("environment-0", "environment", 11.0, 13.0),
        ("environment-0", "environment", 14.0, 15.0),
    ]
