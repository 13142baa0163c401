"""CodeContests, as published on the hub (deepmind/code_contests).

Rows have ``name``, ``description``, ``public_tests``, ``private_tests`` and ``generated_tests`` (each
``{"input": [...], "output": [...]}``), ``solutions`` (``{"language": [...], "solution": [...]}``), ``source`` and
``difficulty`` (class numbers), ``cf_rating``, ``cf_tags``, ``time_limit`` (``seconds``, ``nanos``), ``input_file`` and
``output_file``.
"""

from collections.abc import Iterator
from typing import Any

from services.data.readers import Row
from services.data.recipes.base import (
    CODE_TEMPLATE,
    Dropped,
    Fields,
    checked_tests,
    named,
    optional,
    stdin_tests,
    text,
    want_language,
)
from volley.data import RecipeOptions

SCORER = "code"
TAGS = ("rating", "source")
TEMPLATE = CODE_TEMPLATE
FEWEST_TESTS = 5
LANGUAGES = ("unknown", "python2", "cpp", "python", "java")  # class numbers 0 to 4
LANGUAGE_NAMES = {"PYTHON": "python2", "PYTHON3": "python", "CPP": "cpp", "JAVA": "java"}
SOURCES = ("unknown", "codechef", "codeforces", "hackerearth", "codejam", "atcoder", "aizu")


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row; problems that read files, show pictures or have too few tests are dropped."""
    if optional(row, "input_file") or optional(row, "output_file"):
        raise Dropped("reads or writes files")
    description = text(row, "description")
    if "<image>" in description:
        raise Dropped("the statement has pictures")
    languages = {_language(each) for each in _column(row, optional(row, "solutions"), "language")}
    want_language(options, languages)
    tests = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        group = named(row, "public_tests") if name == "public_tests" else optional(row, name)
        tests += stdin_tests(_column(row, group, "input"), _column(row, group, "output"))
    rating = optional(row, "cf_rating")
    yield {
        "id": text(row, "name"),
        "problem": description,
        "tests": checked_tests(tests, options, FEWEST_TESTS),
        "starter": "",
        "function": "",
        "reads_stdin": True,
        "rating": f"{int(rating) // 400 * 400}+" if rating else "unrated",
        "source": _source(optional(row, "source")),
        "languages": sorted(languages),
    }


def _column(row: Row, group: object, name: str) -> list[Any]:
    """Return a column of a group of lists, which some loaders return as a list of objects."""
    if group is None:
        return []
    if isinstance(group, list):
        return [item[name] for item in group]
    column = group.get(name) if isinstance(group, dict) else None
    if not isinstance(column, list):
        raise row.error(f"a group of tests or solutions has no list '{name}': this is not the published layout")
    return column


def _language(value: object) -> str:
    if isinstance(value, int) and 0 <= value < len(LANGUAGES):
        return LANGUAGES[value]
    return LANGUAGE_NAMES.get(str(value), "unknown")


def _source(value: object) -> str:
    return SOURCES[value] if isinstance(value, int) and 0 <= value < len(SOURCES) else str(value or "unknown").lower()
