"""ARC-AGI-1: ``data/training/<task>.json``, one task per file, ``{"train": [{"input", "output"}], "test": [...]}``.

Each test input is a separate problem. Grids are lists of rows of digits.
"""

import json
from collections.abc import Iterator
from typing import Any

from services.data.readers import Row
from services.data.recipes.base import Dropped, Fields, named
from volley.data import RecipeOptions

SCORER = "arc"
TAGS = ("split",)
TEMPLATE = """Each pair below turns an input grid into an output grid by the same rule.
{% for pair in pairs %}
Input {{ loop.index }}:
{% for row in pair.input %}{{ row | join(" ") }}
{% endfor %}
Output {{ loop.index }}:
{% for row in pair.output %}{{ row | join(" ") }}
{% endfor %}{% endfor %}
Find the rule and apply it to this input:
{% for row in given %}{{ row | join(" ") }}
{% endfor %}
End with the output grid, one row a line, digits between blanks.
"""


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per test input; inputs whose output is not published are dropped."""
    pairs = _pairs(row, "train")
    for number, pair in enumerate(_pairs(row, "test")):
        if pair.get("output") is None:
            raise Dropped("the test output is not published")
        yield {
            "id": f"{row.path.stem}:{number}",
            "problem": json.dumps([*pairs, pair["input"]]),
            "pairs": pairs,
            "given": pair["input"],
            "grid": pair["output"],
            "split": row.path.parent.name,
        }


def _pairs(row: Row, name: str) -> list[dict[str, Any]]:
    pairs = named(row, name)
    if not isinstance(pairs, list) or not pairs:
        raise row.error(f"'{name}' is not a list of pairs: this is not the published layout")
    for pair in pairs:
        if not isinstance(pair, dict) or not _is_grid(pair.get("input")):
            raise row.error(f"'{name}' has a pair without an input grid")
        if pair.get("output") is not None and not _is_grid(pair["output"]):
            raise row.error(f"'{name}' has an output that is not a grid of digits")
    return pairs


def _is_grid(value: object) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= 30
        and all(isinstance(line, list) and line and len(line) == len(value[0]) <= 30 for line in value)
        and all(type(cell) is int and 0 <= cell <= 9 for line in value for cell in line)
    )
