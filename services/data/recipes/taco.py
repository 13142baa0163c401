"""TACO (BAAI/TACO): Python problems, solved by a program that reads standard input or by a function.

Rows have ``question``, ``starter_code``, ``input_output`` (JSON text: ``inputs``, ``outputs`` and, for a call,
``fn_name``), ``solutions`` (JSON text), ``difficulty``, ``tags``, ``skill_types`` and ``source``. For a call, each
input is the list of arguments and the output is the returned value, which most problems wrap in a list of one.
"""

import json
from collections.abc import Iterator
from typing import Any

from services.data.readers import Row
from services.data.recipes.base import (
    CODE_TEMPLATE,
    Dropped,
    Fields,
    checked_tests,
    optional,
    place,
    stdin_tests,
    text,
    want_language,
)
from volley.data import RecipeOptions

SCORER = "code"
TAGS = ("difficulty", "source")
TEMPLATE = CODE_TEMPLATE
FEWEST_TESTS = 5


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row; problems without a solution in the required language or with few tests are dropped."""
    question = text(row, "question")
    if not question.strip():
        raise Dropped("no statement")
    want_language(options, {"python"} if optional(row, "solutions") not in (None, "", "[]") else set())
    function, inputs, outputs = _input_output(row)
    tests = call_tests(function, inputs, outputs) if function else stdin_tests(inputs, outputs)
    yield {
        "id": place(row),
        "problem": question,
        "starter": optional(row, "starter_code") or "",
        "tests": checked_tests(tests, options, FEWEST_TESTS),
        "function": function or "",
        "reads_stdin": not function,
        "difficulty": str(optional(row, "difficulty") or "UNKNOWN"),
        "source": str(optional(row, "source") or "unknown"),
    }


def _input_output(row: Row) -> tuple[str | None, list[Any], list[Any]]:
    raw = optional(row, "input_output")
    if raw is None or raw == "":
        raise Dropped("no tests")
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError) as error:
        raise Dropped("the tests are not JSON") from error
    inputs, outputs = (value.get("inputs"), value.get("outputs")) if isinstance(value, dict) else (None, None)
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise row.error("input_output has no lists 'inputs' and 'outputs': this is not the published layout")
    if len(inputs) != len(outputs):
        raise Dropped("inputs and outputs differ in number")
    return value.get("fn_name"), inputs, outputs


def call_tests(function: str, inputs: list[Any], outputs: list[Any]) -> list[dict[str, Any]]:
    """Return the tests of a function. If all outputs are lists of one, their items are the expected values."""
    if not all(isinstance(each, list) for each in inputs):
        raise Dropped("the arguments of a call are not a list")
    wrapped = all(isinstance(each, list) and len(each) == 1 for each in outputs)
    return [
        {"function": function, "args": arguments, "expected": wanted[0] if wrapped else wanted}
        for arguments, wanted in zip(inputs, outputs, strict=True)
    ]
