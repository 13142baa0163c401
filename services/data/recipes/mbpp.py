"""MBPP, full and sanitized.

Full rows have ``task_id``, ``text``, ``code``, ``test_list``, ``test_setup_code`` and ``challenge_test_list``;
sanitized rows have ``task_id``, ``prompt``, ``code``, ``test_imports`` and ``test_list``. The prompt shows the tests,
because the problems do not name the function otherwise.
"""

from collections.abc import Iterator

from services.data.readers import Row
from services.data.recipes.base import Fields, checked_tests, named, optional, text, want_language
from volley.data import RecipeOptions

SCORER = "code"
TAGS = ()
TEMPLATE = """{{ problem }}

Your code must pass these tests:

```python
{% for line in shown %}{{ line }}
{% endfor %}```

Put the whole program in one block between lines of three backticks.
"""


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row; the tests in ``challenge_test_list`` are scored too, but not shown."""
    want_language(options, {"python"})
    shown, hidden = named(row, "test_list"), optional(row, "challenge_test_list") or []
    imports = optional(row, "test_imports") or []
    if not all(
        isinstance(lines, list) and all(isinstance(line, str) for line in lines) for lines in (shown, hidden, imports)
    ):
        raise row.error("test_list, challenge_test_list and test_imports must be lists of strings")
    setup = "\n".join([str(optional(row, "test_setup_code") or ""), *imports]).strip()
    tests = [{"asserts": f"{setup}\n{line}".strip()} for line in (*shown, *hidden)]
    yield {
        "id": f"mbpp/{named(row, 'task_id')}",
        "problem": text(row, "text", "prompt"),
        "shown": shown,
        "tests": checked_tests(tests, options, 1),
        "solution": str(optional(row, "code") or ""),
    }
