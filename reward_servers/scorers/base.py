"""What every scorer is, and the small helpers they share."""

from collections.abc import Sequence
from typing import Protocol

from volley.errors import JobError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import RewardValues


class Scorer(Protocol):
    """Judges the samples of one prompt. Idempotent: the same samples may be scored again after a failure."""

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        """One verdict per text, in order. Raises nothing on account of what a text holds."""
        ...

    def close(self) -> None:
        """End every process the scorer started. May be called twice."""
        ...


def infra_error(detail: str) -> Verdict:
    """The scorer itself failed: the sample keeps no reward and leaves its group."""
    return Verdict(VerdictStatus.INFRA_ERROR, None, detail=one_line(detail))


def passed_or(status: VerdictStatus, values: RewardValues, *, answer: str | None = None, detail: str = "") -> Verdict:
    """A verdict of a scorer that only tells right from wrong."""
    reward = values.passed if status is VerdictStatus.PASSED else values.failed
    return Verdict(status, reward, answer=answer, detail=detail)


def row_error(prompt: Prompt, problem: str, field: str = "") -> JobError:
    """A dataset row its scorer can not use; ``field`` should hold more than a text, which a CSV has no way to say."""
    text = isinstance(prompt.reference.get(field), str)
    advice = f"; {field!r} is a text here, data.json_fields: [{field}] has it read as JSON" if text else ""
    return JobError(f"prompt {prompt.id}: {problem}{advice}")


def one_line(text: str, limit: int = 300) -> str:
    """``text`` as one printable line for logs and pages: control characters escaped, at most ``limit`` characters."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape", "backslashreplace").decode() for ch in cut)


def escaped(data: bytes, limit: int) -> str:
    """Program output for people and logs: at most ``limit`` characters, no control character but the line feed."""
    text = data[: 4 * limit].decode("utf-8", "backslashreplace")[:limit]
    return "".join(ch if ch == "\n" or ch.isprintable() else repr(ch)[1:-1] for ch in text)
