"""Scorers by kind. ``check_scorer`` runs before any process starts; ``build_scorer`` runs where samples are scored."""

import importlib
from collections.abc import Iterable
from typing import Any

from reward_servers.scorers.base import Scorer
from volley.plugins import SCORERS, ScorerPlugin, plugin_of, resolved
from volley.records import Prompt
from volley.scoring import FormatTerm, LengthTerm, PythonScorer, ScorerSpec, SumScorer, Term

__all__ = ["Scorer", "brings_code", "build_scorer", "check_scorer"]

_KINDS = {  # imported when asked for: a worker starts with what its scorer needs and no more
    "arc": "arc:Arc",
    "code": "code:Code",
    "countdown": "countdown:Countdown",
    "exact": "exact:Exact",
    "format": "compose:Format",
    "http": "remote:Remote",
    "length": "compose:Length",
    "math": "math:Math",
    "python": "python:PythonFunction",
    "regex": "regex:Regex",
    "sum": "compose:Sum",
}


def check_scorer(spec: ScorerSpec | Term, rows: Iterable[Prompt], *, code_is_here: bool = True) -> None:
    """Refuse a scorer that does not exist or rows it can not use.

    Args:
        code_is_here: False where a function of the user's own only comes with the run's processes.

    Raises:
        JobError: names the import path, or the prompt and the field it lacks.
    """
    parts = [part for part in _parts(spec) if not isinstance(part, LengthTerm | FormatTerm)]
    classes = [_class_of(part) for part in parts]
    for part, scorer in zip(parts, classes, strict=True):
        if hasattr(scorer, "check") and (code_is_here or not isinstance(part, PythonScorer)):
            scorer.check(part)
    for row in rows:
        for part, scorer in zip(parts, classes, strict=True):
            if hasattr(scorer, "check_row"):
                scorer.check_row(part, row)


def brings_code(spec: ScorerSpec | Term) -> bool:
    """Is any part of the scorer not Volley's own? Importing that may import anything."""
    return any(isinstance(part, PythonScorer) or part.kind not in _KINDS for part in _parts(spec))


def build_scorer(spec: ScorerSpec | Term) -> Scorer:
    """The scorer ``spec`` describes, ready to score; the caller closes it.

    Raises:
        HostError: this machine can not isolate model-written code as the scorer asks.
    """
    scorer: Scorer = _class_of(spec)(spec, build_scorer) if isinstance(spec, SumScorer) else _class_of(spec)(spec)
    return scorer


def _class_of(spec: Any) -> Any:
    if spec.kind not in _KINDS:
        return resolved(plugin_of(SCORERS, spec.kind, ScorerPlugin).scorer)
    module, _, name = _KINDS[spec.kind].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _parts(spec: Any) -> list[Any]:
    return [term.scorer for term in spec.terms] if isinstance(spec, SumScorer) else [spec]
