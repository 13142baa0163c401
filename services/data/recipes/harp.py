"""HARP: US contest problems, ``HARP.jsonl.zip``.

Rows have ``problem``, ``answer``, ``solution_1`` ..., ``year``, ``contest``, ``number``, ``level`` (1 to 6) and
``subject``. The multiple-choice split adds ``choices`` and ``answer_choice``; the proof split has no ``answer``.
"""

from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import MATH_TEMPLATE, Dropped, Fields, named, optional, text
from volley.data import RecipeOptions

SCORER = "math"
TAGS = ("level", "subject", "contest")
TEMPLATE = MATH_TEMPLATE


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one short-answer problem per row; proofs and problems that need their choices are dropped."""
    answer = optional(row, "answer")
    if answer is None or not str(answer).strip():
        raise Dropped("no short answer, so it is a proof")
    if optional(row, "multiple_choice_only"):
        raise Dropped("answerable only with its choices")
    year, contest, number = (named(row, name) for name in ("year", "contest", "number"))
    yield {
        "id": f"{year}/{contest}/{number}",
        "problem": text(row, "problem"),
        "answer": _plain(str(answer)),
        "solution": optional(row, "solution_1") or "",
        "level": str(named(row, "level")),
        "subject": text(row, "subject"),
        "contest": str(contest),
    }


def _plain(answer: str) -> str:
    """Strip the dollar signs of an answer that is a single formula."""
    inner = answer.strip()
    if len(inner) > 2 and inner.startswith("$") and inner.endswith("$") and "$" not in inner[1:-1]:
        return inner[1:-1].strip()
    return inner
