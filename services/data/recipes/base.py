"""The interface of recipes, which turn a published row into problems that a scorer can judge, and their helpers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from reward_servers.scorers.asserts import split_asserts
from reward_servers.scorers.cases import parse_tests
from services.data.readers import Bad, Row, called
from services.data.report import DropReport
from volley.data import RecipeOptions
from volley.errors import DataError

Fields = dict[str, Any]
Test = dict[str, Any]


class Recipe(Protocol):
    """A recipe is a module with these names.

    Attributes:
        SCORER: kind of the scorer that reads its fields.
        TAGS: fields by which evaluations are broken down.
        TEMPLATE: Jinja template of the prompt over the fields.
    """

    SCORER: str
    TAGS: tuple[str, ...]
    TEMPLATE: str

    def problems(self, row: Row, options: RecipeOptions) -> Iterator[Fields]:
        """Yield the row's problems, each with ``id``, ``problem`` and the fields that the scorer reads.

        Raises:
            Dropped: the row is well-formed but unsuitable.
            DataError: the row is not in the published layout.
        """
        ...


class Dropped(ValueError):
    """The row is not used, for the reason in the message."""


def problems_of(recipe: Recipe, row: Row, options: RecipeOptions, report: DropReport, bad: Bad) -> Iterator[Row]:
    """Yield the problems of a row as rows; dropped ones are counted in ``report``, malformed ones passed to ``bad``."""
    try:
        for fields in recipe.problems(row, options):
            yield Row(row.path, row.number, fields)
    except Dropped as reason:
        report.drop(str(reason), row)
    except DataError as error:
        bad(error)


def named(row: Row, *names: str) -> Any:
    """Return the first of the fields ``names`` that is there, ignoring case. Raises `DataError` if none is."""
    value = optional(row, *names)
    if value is None:
        raise row.error(f"no field '{names[0]}', so this is another layout; the row has {row.columns()}")
    return value


def optional(row: Row, *names: str) -> Any:
    """Like `named`, but return None if none is there."""
    for name in names:
        if row.fields.get(name) is not None:
            return row.fields[name]
    lowered = {key.lower(): value for key, value in row.fields.items()}
    return next((lowered[name.lower()] for name in names if lowered.get(name.lower()) is not None), None)


def text(row: Row, *names: str) -> str:
    """Like `named`, but raise `DataError` if the value is not a string."""
    value = named(row, *names)
    if not isinstance(value, str):
        raise row.error(f"field '{names[0]}' is {called(value)}, not a string")
    return value


def place(row: Row) -> str:
    """Return an id for a row without one: file and number, or folder and file if each problem has its own file."""
    if row.path.suffix == ".json" and row.number == 1:
        return f"{row.path.parent.name}/{row.path.stem}"
    return f"{row.path.name.split('.')[0]}:{row.number}"


def stdin_tests(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Test]:
    """Return tests of a program's standard input and output; a list of lines is joined."""
    return [
        {"stdin": _joined(given), "expected": _joined(wanted)} for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _joined(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def checked_tests(tests: Sequence[Test], options: RecipeOptions, fewest: int) -> list[Test]:
    """Return the first ``max_tests`` distinct tests.

    Raises:
        Dropped: too few remain, or the scorer cannot run them.
    """
    unique: dict[str, Test] = {repr(test): test for test in tests}
    kept = list(unique.values())[: options.max_tests]
    fewest = options.min_tests or fewest
    if _count(kept) < fewest:
        raise Dropped(f"fewer than {fewest} tests")
    try:
        parse_tests(kept)
    except ValueError as error:
        raise Dropped("the code scorer cannot run its tests") from error
    return kept


def _count(tests: Sequence[Mapping[str, Any]]) -> int:
    total = 0
    for test in tests:
        if "asserts" in test:
            try:
                total += len(split_asserts(test["asserts"], test.get("function")))
            except ValueError:
                total += 1
        else:
            total += 1
    return total


def want_language(options: RecipeOptions, known: set[str]) -> None:
    """Raise `Dropped` if the job requires a language in which no correct solution is known."""
    if options.language is not None and options.language.lower() not in known:
        raise Dropped(f"no correct solution in {options.language}")


CODE_TEMPLATE = """{{ problem }}
{% if starter %}
Begin with this code and complete it:

```python
{{ starter }}
```
{% endif %}{% if reads_stdin %}
Write a Python program that reads from standard input and writes the answer to standard output.
{% elif not starter %}
Write a Python function `{{ function }}` that solves it.
{% endif %}
Put the whole program in one block between lines of three backticks.
"""

MATH_TEMPLATE = """{{ problem }}

Reason step by step and put the final answer in \\boxed{}.
"""
