"""Scorers by kind. ``check_scorer`` runs before any process starts, ``build_scorer`` in the processes that score."""

import contextlib
import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from reward_servers.scorers.base import ALONE, Place, Scorer
from volley.errors import JobError
from volley.plugins import SCORERS, ScorerPlugin, plugin_of, resolved
from volley.records import Prompt, Verdict
from volley.scoring import FormatTerm, LengthTerm, PythonScorer, ScorerSpec, SumScorer, Term

__all__ = ["Scorer", "build_scorer", "check_scorer", "import_functions", "names_plugin", "try_scorer"]

_KINDS = {  # imported on demand, so that a worker loads only what its scorer needs
    "arc": "arc:Arc",
    "code": "code:Code",
    "countdown": "countdown:Countdown",
    "exact": "exact:Exact",
    "format": "compose:Format",
    "http": "remote:Remote",
    "length": "compose:Length",
    "math": "math:Math",
    "python": "python:PythonFunction",
    "reasoning_gym": "reasoning_gym:ReasoningGym",
    "regex": "regex:Regex",
    "sum": "compose:Sum",
}


def check_scorer(spec: ScorerSpec | Term, rows: Iterable[Prompt], *, code_is_here: bool = True) -> None:
    """Check that the scorer exists and can use all rows.

    Args:
        code_is_here: False if the user's functions can be imported only in the processes of the run.

    Raises:
        JobError: the scorer or a row is invalid; names the import path, or the prompt and the missing field.
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


def try_scorer(spec: ScorerSpec | Term, prompt: Prompt, text: str) -> list[tuple[str, Verdict]]:
    """Call every function of the user that the scorer names, once, isolated as when a run scores.

    Returns:
        (target, verdict) of each function.

    Raises:
        JobError: a function raised, hung or ended its process; the message has the traceback.
    """
    functions = [part for part in _parts(spec) if isinstance(part, PythonScorer)]
    return [(part.target, _class_of(part).attempt(part, prompt, text)) for part in functions]


def names_plugin(spec: ScorerSpec | Term) -> bool:
    """Return whether any part of the scorer comes from a plug-in."""
    return any(part.kind not in _KINDS for part in _parts(spec))


def import_functions(spec: ScorerSpec | Term) -> None:
    """Import the user's functions that the scorer names, ignoring failures, which `check_scorer` reports."""
    for part in _parts(spec):
        if isinstance(part, PythonScorer):
            with contextlib.suppress(JobError):
                _class_of(part).check(part)


def build_scorer(spec: ScorerSpec | Term, place: Place = ALONE) -> Scorer:
    """Build the scorer that ``spec`` describes, for ``place``; the caller must close it.

    Raises:
        HostError: this machine cannot isolate model-written code as the scorer requires, or lock files in the place.
    """
    scorer: Scorer
    match spec:
        case SumScorer():
            scorer = _class_of(spec)(spec, partial(build_scorer, place=place))
        case PythonScorer():
            scorer = _class_of(spec)(spec, place)
        case _:
            scorer = _class_of(spec)(spec)
    return scorer


def _class_of(spec: Any) -> Any:
    if spec.kind not in _KINDS:
        return resolved(plugin_of(SCORERS, spec.kind, ScorerPlugin).scorer)
    module, _, name = _KINDS[spec.kind].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _parts(spec: Any) -> list[Any]:
    return [term.scorer for term in spec.terms] if isinstance(spec, SumScorer) else [spec]
