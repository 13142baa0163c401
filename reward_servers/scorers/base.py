"""The scorer interface and helpers that scorers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from volley.errors import JobError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import RewardValues


class Scorer(Protocol):
    """Scores the samples of one prompt. Must be idempotent: samples may be scored again after a failure."""

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        """Return one verdict per text, in order. Must not raise because of the content of a text."""
        ...

    def close(self) -> None:
        """Stop every process that the scorer started. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a scorer works.

    Attributes:
        folder: kept over a resume and shared by the run's reward workers; None if nothing is kept.
        group_s: seconds within which a group should be scored; None: any time.
    """

    folder: Path | None = None
    group_s: float | None = None


ALONE = Place()


def infra_error(detail: str, *, mistake: str = "") -> Verdict:
    """Return the verdict for a failure of the scorer itself: no reward, and the sample is dropped from its group."""
    return Verdict(VerdictStatus.INFRA_ERROR, None, detail=one_line(detail), mistake=one_line(mistake))


def passed_or(status: VerdictStatus, values: RewardValues, *, answer: str | None = None, detail: str = "") -> Verdict:
    """Return a verdict with one of two rewards, depending on whether ``status`` is passed."""
    reward = values.passed if status is VerdictStatus.PASSED else values.failed
    return Verdict(status, reward, answer=answer, detail=detail)


def row_error(prompt: Prompt, problem: str, field: str = "") -> JobError:
    """Return the error for an unusable row; if ``field`` is a string, as in a CSV, it suggests ``json_fields``."""
    text = isinstance(prompt.reference.get(field), str)
    advice = f"; {field!r} is a string here: set data.json_fields: [{field}] to parse it as JSON" if text else ""
    return JobError(f"prompt {prompt.id}: {problem}{advice}")


def one_line(text: str, limit: int = 300) -> str:
    """Cut ``text`` to ``limit`` characters and escape control characters, for one line of a log or page."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape", "backslashreplace").decode() for ch in cut)


def escaped(data: bytes, limit: int) -> str:
    """Decode up to ``limit`` characters of output for display, with control characters except newlines escaped."""
    text = data[: 4 * limit].decode("utf-8", "backslashreplace")[:limit]
    return "".join(ch if ch == "\n" or ch.isprintable() else repr(ch)[1:-1] for ch in text)
