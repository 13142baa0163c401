"""The timeline of a step is bounded, whatever the size of its batch, and says the same of who was busy."""

import pytest

from services.timeline import MOST_PROCESSES, MOST_SPANS, Span, bounded


def covered(spans: list[Span], process: str) -> float:
    """Seconds in which the process did something."""
    done, until = 0.0, float("-inf")
    for _, _, start, end in sorted((span for span in spans if span[0] == process), key=lambda span: span[2]):
        done += max(0.0, end - max(start, until))
        until = max(until, end)
    return done


def test_a_small_step_is_told_as_it_was() -> None:
    spans: list[Span] = [("actor-0", "generate", 0.0, 1.0), ("actor-0", "generate", 0.5, 2.0)]
    assert bounded(spans) == spans


@pytest.mark.parametrize("actors", [1, 8, 50])
def test_a_large_step_is_joined_where_one_process_works_on(actors: int) -> None:
    groups = [i / 100 for i in range(4096)]
    spans: list[Span] = [("learner", "learn", 41.0, 44.0)]
    for i, at in enumerate(groups):
        spans.append((f"actor-{i % actors}", "generate", at, at + 3.0))
        spans.append((f"reward-{i % 4}", "score", at + 3.0, at + 3.03))
    told = bounded(spans)
    assert len(told) <= MOST_SPANS
    assert ("learner", "learn", 41.0, 44.0) in told
    for process in ("actor-0", "learner"):
        assert covered(told, process) == pytest.approx(covered(spans, process), rel=0.02)
    assert covered(told, "reward-0") >= covered(spans, "reward-0")


def test_processes_beyond_what_can_be_shown_are_left_out() -> None:
    spans: list[Span] = [("learner", "learn", 0.0, 1.0)]
    spans += [(f"actor-{i}", "generate", float(j), j + 0.5) for i in range(1000) for j in range(8)]
    told = bounded(spans)
    assert len(told) <= MOST_SPANS
    assert len({process for process, *_ in told}) == MOST_PROCESSES + 1
