"""Who did what and when in one step: spans of (process, stage, start, end), whose number is bounded."""

from collections.abc import Iterable
from typing import Any

from services.coordinator.records import FinishedStep

MAX_SPANS = 256
MAX_PROCESSES = 60  # actors, environment and reward workers shown per step: the first that occur

Span = tuple[str, str, float, float]  # process, stage, start and end in seconds since 1970


def timeline(finished: FinishedStep) -> dict[str, Any]:
    """The step's entry in the timeline stream."""
    times, ended = finished.times, finished.times.published + finished.broadcast.seconds
    spans: list[Span] = [
        ("learner", "learn", times.waited, times.learned),
        ("learner", "publish", times.publishing, times.gathered),
    ]
    for episodes in finished.episodes.figures if finished.episodes else ():
        spans += [(episodes.actor, "generate", *span) for span in episodes.model_spans()]
        spans += [(episodes.worker, "environment", *span) for span in episodes.environment_spans() if episodes.worker]
    for ready in finished.batch.groups:
        if finished.episodes is None:
            spans.append((ready.meta.actor, "generate", *ready.generated))
        if ready.scores.worker:
            spans.append((ready.scores.worker, "score", ready.scored - ready.scores.seconds, ready.scored))
    spans += [
        (actor.actor, "update", ended - actor.fetch_seconds - actor.stall_seconds, ended)
        for actor in finished.broadcast.actors
    ]
    return {
        "step": finished.step,
        "time": times.published,
        "spans": [[process, stage, round(start, 3), round(end, 3)] for process, stage, start, end in bounded(spans)],
    }


def bounded(spans: list[Span], limit: int = MAX_SPANS, processes: int = MAX_PROCESSES) -> list[Span]:
    """At most ``limit`` spans. If there are more, spans of one process and stage with short pauses between are merged.

    ``limit`` must be at least three for each of the ``processes`` and the learner.
    """
    shown = list(dict.fromkeys(process for process, *_ in spans))[: processes + 1]
    kept = [span for span in spans if span[0] in shown]
    pause = 0.0
    while len(kept) > limit:
        kept = _merged(kept, pause)
        pause = max(2 * pause, 1e-3)
    return kept


def _merged(spans: Iterable[Span], pause: float) -> list[Span]:
    """The spans, with those of one process and stage merged that are at most ``pause`` seconds apart."""
    merged: list[Span] = []
    for process, stage, start, end in sorted(spans):
        if merged and merged[-1][:2] == (process, stage) and start <= merged[-1][3] + pause:
            merged[-1] = (process, stage, merged[-1][2], max(end, merged[-1][3]))
        else:
            merged.append((process, stage, start, end))
    return merged
