"""Scorers by kind. ``check_scorer`` runs before any process starts; ``build_scorer`` runs where samples are scored."""

from collections.abc import Iterable

from reward_servers.scorers.base import Scorer
from reward_servers.scorers.countdown import Countdown
from reward_servers.scorers.exact import Exact
from reward_servers.scorers.python import PythonFunction
from volley.records import Prompt
from volley.scoring import CountdownScorer, ExactScorer, PythonScorer, ScorerSpec

__all__ = ["Scorer", "build_scorer", "check_scorer"]


def check_scorer(spec: ScorerSpec, rows: Iterable[Prompt]) -> None:
    """Refuse a scorer that does not exist or rows it can not use.

    Raises:
        JobError: names the import path, or the prompt and the field it lacks.
    """
    kind = _class_of(spec)
    kind.check(spec)  # type: ignore[arg-type]
    for row in rows:
        kind.check_row(spec, row)  # type: ignore[arg-type]


def build_scorer(spec: ScorerSpec) -> Scorer:
    """The scorer ``spec`` describes, ready to score; the caller closes it."""
    return _class_of(spec)(spec)  # type: ignore[arg-type]


def _class_of(spec: ScorerSpec) -> type[Countdown] | type[Exact] | type[PythonFunction]:
    match spec:
        case CountdownScorer():
            return Countdown
        case ExactScorer():
            return Exact
        case PythonScorer():
            return PythonFunction
