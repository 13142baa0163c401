"""AIME: answers are whole numbers from 0 to 999.

Reads the layouts in use: ``problem``/``answer`` with ``id`` and ``year`` (HuggingFaceH4/aime_2024,
AI-MO/aimo-validation-aime), ``ID``/``Problem``/``Answer`` (Maxwell-Jia/AIME_2024), ``question``/``answer``
(opencompass/AIME2025), ``problem_idx``/``problem``/``answer`` (MathArena), ``ID``/``Year``/``Question``/``Answer``.
"""

import re
from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import MATH_TEMPLATE, Fields, named, optional, place, text
from volley.data import RecipeOptions

SCORER = "math"
TAGS = ("year",)
TEMPLATE = MATH_TEMPLATE


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row."""
    raw = str(named(row, "answer")).strip().strip("$")
    number = re.fullmatch(r"(\d{1,3})(?:\.0+|\^\\circ|°)?", raw)
    if number is None:
        raise row.error(f"answer {raw[:40]!r} is not a whole number from 0 to 999")
    name = str(optional(row, "id", "problem_idx") or place(row))
    year = re.search(
        r"\b(?:19|20)\d\d\b", f"{optional(row, 'year') or ''} {name} {optional(row, 'url') or ''}".replace("_", " ")
    )
    yield {
        "id": name,
        "problem": text(row, "problem", "question"),
        "answer": str(int(number.group(1))),
        "solution": str(optional(row, "solution") or ""),
        "year": year.group() if year else "?",
    }
