"""What a recipe is: one row as published to the problems a scorer can judge."""

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
        TAGS: fields that evaluations are broken down by.
        TEMPLATE: Jinja text of the prompt, over the fields.
    """

    SCORER: str
    TAGS: tuple[str, ...]
    TEMPLATE: str

    def problems(self, row: Row, options: RecipeOptions) -> Iterator[Fields]:
        """The row's problems, each with ``id``, ``problem`` and what the scorer reads.

        Raises:
            Dropped: the row is well-formed, but not wanted.
            DataError: the row is not in the published layout.
        """
        ...


class Dropped(ValueError):
    """The row is not used, for the reason given."""


def problems_of(recipe: Recipe, row: Row, options: RecipeOptions, report: DropReport, bad: Bad) -> Iterator[Row]:
    """The problems of a row as rows of their own; what is dropped goes to ``report``, what is malformed to ``bad``."""
    try:
        for fields in recipe.problems(row, options):
            yield Row(row.path, row.number, fields)
    except Dropped as reason:
        report.drop(str(reason), row)
    except DataError as error:
        bad(error)


def named(row: Row, *names: str) -> Any:
    """The value under the first of ``names`` the row has, whatever their case; raises `DataError` where it has none."""
    value = optional(row, *names)
    if value is None:
        raise row.error(f"no field '{names[0]}', so this is another layout; the row has {row.columns()}")
    return value


def optional(row: Row, *names: str) -> Any:
    """As `named`, None where there is none."""
    for name in names:
        if row.fields.get(name) is not None:
            return row.fields[name]
    lowered = {key.lower(): value for key, value in row.fields.items()}
    return next((lowered[name.lower()] for name in names if lowered.get(name.lower()) is not None), None)


def text(row: Row, *names: str) -> str:
    """The text under the first of ``names``; raises `DataError` for anything else."""
    value = named(row, *names)
    if not isinstance(value, str):
        raise row.error(f"field '{names[0]}' is {called(value)}, not a text")
    return value


def place(row: Row) -> str:
    """An id for a row that has none: file and number; of a folder of one problem a file, folder and file."""
    if row.path.suffix == ".json" and row.number == 1:
        return f"{row.path.parent.name}/{row.path.stem}"
    return f"{row.path.name.split('.')[0]}:{row.number}"


def stdin_tests(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Test]:
    """Tests of a program; a list of lines counts as the lines."""
    return [
        {"stdin": _joined(given), "expected": _joined(wanted)} for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def checked_tests(tests: Sequence[Test], options: RecipeOptions, fewest: int) -> list[Test]:
    """``tests`` without repetitions, the first ``max_tests`` of them.

    Raises:
        Dropped: too few are left, or the scorer can not run them.
    """
    unique: dict[str, Test] = {repr(test): test for test in tests}
    kept = list(unique.values())[: options.max_tests]
    fewest = options.min_tests or fewest
    if _count(kept) < fewest:
        raise Dropped(f"fewer than {fewest} tests")
    try:
        parse_tests(kept)
    except ValueError as error:
        raise Dropped("tests the code scorer can not run") from error
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
    """Raises `Dropped` where the job asks for a language that no correct solution is known in."""
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
