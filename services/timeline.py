"""Who did what when in one step: spans of (process, stage, start, end), of which there are never many."""

from collections.abc import Iterable
from typing import Any

from services.steps import FinishedStep

MOST_SPANS = 256
MOST_PROCESSES = 60  # actors and reward workers shown of a step, those that are met first

Span = tuple[str, str, float, float]  # process, stage, start and end in seconds since 1970


def timeline(finished: FinishedStep) -> dict[str, Any]:
    """The entry of one step in the stream."""
    times, ended = finished.times, finished.times.published + finished.broadcast.seconds
    spans: list[Span] = [
        ("learner", "learn", times.waited, times.learned),
        ("learner", "publish", times.learned, times.gathered),
    ]
    for ready in finished.batch:
        begun, generated = ready.generated
        spans.append((ready.meta.actor, "generate", begun, generated))
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


def bounded(spans: list[Span], most: int = MOST_SPANS, processes: int = MOST_PROCESSES) -> list[Span]:
    """At most ``most`` of them: where there are more, work of one process with short pauses between is one span.

    ``most`` must be at least three for each of the ``processes`` and the learner, which are kept.
    """
    shown = list(dict.fromkeys(process for process, *_ in spans))[: processes + 1]
    kept = [span for span in spans if span[0] in shown]
    pause = 0.0
    while len(kept) > most:
        kept = _joined(kept, pause)
        pause = max(2 * pause, 1e-3)
    return kept


def _joined(spans: Iterable[Span], pause: float) -> list[Span]:
    """Spans of one process and stage that are no further than ``pause`` seconds apart are one."""
    joined: list[Span] = []
    for process, stage, start, end in sorted(spans):
        if joined and joined[-1][:2] == (process, stage) and start <= joined[-1][3] + pause:
            joined[-1] = (process, stage, joined[-1][2], max(end, joined[-1][3]))
        else:
            joined.append((process, stage, start, end))
    return joined
