"""MATH: competition problems whose solution ends in a box.

As published: ``MATH/train/<subject>/<n>.json``, one object a file with ``problem``, ``level`` ("Level 5"), ``type``
("Algebra") and ``solution``; on the hub the same four fields as rows.
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
    """One problem a row; one without a boxed answer is dropped."""
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
    r"""``\boxed 5`` and ``\fbox{5}``, which some solutions end in."""
    _, found, rest = solution.rpartition("\\boxed ")
    if found:
        return rest.split("$")[0].strip().rstrip(".") or None
    return final_answer(solution.replace("\\fbox{", "\\boxed{"), "boxed") if "\\fbox{" in solution else None
