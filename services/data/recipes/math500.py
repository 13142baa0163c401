"""MATH-500: rows with ``problem``, ``solution``, ``answer``, ``subject``, ``level`` (1 to 5) and ``unique_id``."""

from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import MATH_TEMPLATE, Fields, named, optional, place, text
from volley.data import RecipeOptions

SCORER = "math"
TAGS = ("level", "subject")
TEMPLATE = MATH_TEMPLATE


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row."""
    yield {
        "id": str(optional(row, "unique_id") or place(row)).removesuffix(".json"),
        "problem": text(row, "problem"),
        "answer": text(row, "answer"),
        "solution": optional(row, "solution") or "",
        "level": str(named(row, "level")),
        "subject": text(row, "subject"),
    }
