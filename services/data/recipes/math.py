"""MATH: competition problems whose solution ends in a boxed answer.

Published as ``MATH/train/<subject>/<n>.json``, one object per file with ``problem``, ``level`` ("Level 5"), ``type``
("Algebra") and ``solution``; on the hub, rows have the same four fields.
"""

from collections.abc import Iterator

from reward_servers.scorers.math_text import final_answer
from services.data.readers import Row
from services.data.recipes.base import MATH_TEMPLATE, Dropped, Fields, optional, place, text
from volley.data import RecipeOptions

SCORER = "math"
TAGS = ("level", "subject")
TEMPLATE = MATH_TEMPLATE


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row; rows without a boxed answer are dropped."""
    solution = text(row, "solution")
    answer = final_answer(solution, "boxed") or _bare_box(solution)
    if answer is None:
        raise Dropped("no boxed answer in the solution")
    yield {
        "id": place(row),
        "problem": text(row, "problem"),
        "answer": answer,
        "solution": solution,
        "level": str(optional(row, "level") or "").removeprefix("Level ") or "?",
        "subject": str(optional(row, "type", "subject") or "?"),
    }


def _bare_box(solution: str) -> str | None:
    r"""Return the answer in ``\boxed 5`` or ``\fbox{5}``, with which some solutions end."""
    _, found, rest = solution.rpartition("\\boxed ")
    if found:
        return rest.split("$")[0].strip().rstrip(".") or None
    return final_answer(solution.replace("\\fbox{", "\\boxed{"), "boxed") if "\\fbox{" in solution else None
