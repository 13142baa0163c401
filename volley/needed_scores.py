"""What objectives need of a scorer beside rewards: ranks to pick by, and answers to vote on."""

from volley.objectives.spec import BestOfK, MajAtK, Objective
from volley.scoring import (
    ArcScorer,
    CodeScorer,
    CountdownScorer,
    ExactScorer,
    FormatTerm,
    HttpScorer,
    LengthTerm,
    MathScorer,
    ReasoningGymScorer,
    RegexScorer,
    SumScorer,
)

_WITHOUT_RANKS = (
    ArcScorer,
    CountdownScorer,
    ExactScorer,
    FormatTerm,
    LengthTerm,
    MathScorer,
    ReasoningGymScorer,
    RegexScorer,
)
_WITHOUT_ANSWERS = (CodeScorer, FormatTerm, HttpScorer, LengthTerm)


def check_scorer(scorer: object, objective: Objective, *, has_program: bool) -> None:
    """Reject an objective that picks by rank, or votes, if nothing gives ranks or answers.

    Args:
        scorer: the job's, or None.
        has_program: whether a program makes the samples; it may return answers, and never ranks.

    Raises:
        ValueError: names the change to make.
    """
    first = _first(scorer)
    kind = "a job without scorer" if scorer is None else f"scorer kind: {getattr(scorer, 'kind', '')}"
    if isinstance(objective, BestOfK) and isinstance(first, (*_WITHOUT_RANKS, type(None))):
        raise ValueError(
            f"best_of_k picks samples by their rank, and {kind} gives none: write kind: max_at_k, or a scorer of kind "
            "python, http, or code with public tests"
        )
    if isinstance(objective, MajAtK) and isinstance(first, _WITHOUT_ANSWERS) and not has_program:
        raise ValueError(
            f"maj_at_k has samples with the same answer vote together, and {kind} extracts no answers: write kind: "
            "max_at_k, or a scorer such as exact, math, regex or python"
        )


def _first(scorer: object) -> object:
    """The scorer itself, or the first term of a sum, which sets its ranks and answers."""
    return _first(scorer.terms[0].scorer) if isinstance(scorer, SumScorer) else scorer
