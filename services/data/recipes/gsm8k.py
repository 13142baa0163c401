"""GSM8K: rows with ``question`` and ``answer``; the answer's last line is ``#### 1,234``."""

import re
from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import MATH_TEMPLATE, Dropped, Fields, place, text
from volley.data import RecipeOptions

SCORER = "math"
TAGS = ("steps",)
TEMPLATE = MATH_TEMPLATE
CALCULATION = re.compile(r"<<[^<>]*>>")


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row; ``steps`` is the number of lines of its solution, without calculator annotations."""
    solution, found, answer = text(row, "answer").rpartition("####")
    if not found or not answer.strip():
        raise Dropped("no answer after ####")
    yield {
        "id": place(row),
        "problem": text(row, "question"),
        "answer": answer.strip().replace(",", ""),
        "solution": CALCULATION.sub("", solution).strip(),
        "steps": str(len([line for line in solution.splitlines() if line.strip()])),
    }
