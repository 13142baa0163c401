"""HumanEval: rows with ``task_id``, ``prompt`` (a signature with its docstring), ``canonical_solution``, ``test`` (a
function ``check(candidate)``) and ``entry_point``. Published as ``HumanEval.jsonl.gz``.
"""

from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import Fields, checked_tests, optional, text, want_language
from volley.data import RecipeOptions

SCORER = "code"
TAGS = ()
TEMPLATE = """Complete this Python function:

```python
{{ problem }}```

Put the whole function, with its imports and helpers, in one block between lines of three backticks.
"""


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row."""
    want_language(options, {"python"})
    function = text(row, "entry_point")
    yield {
        "id": text(row, "task_id"),
        "problem": text(row, "prompt").rstrip("\n") + "\n",
        "tests": checked_tests([{"asserts": text(row, "test"), "function": function}], options, 1),
        "function": function,
        "solution": text(row, "prompt") + str(optional(row, "canonical_solution") or ""),
    }
