"""LiveCodeBench code generation (livecodebench/code_generation and code_generation_lite).

Rows have ``question_title``, ``question_content``, ``platform``, ``question_id``, ``contest_date``, ``starter_code``,
``difficulty``, ``public_test_cases`` (JSON text), ``private_test_cases`` (JSON text, or that text as base64 of zlib of
a pickle) and ``metadata`` (JSON text, with ``func_name`` for calls). A test has ``input``, ``output`` and ``testtype``;
a call's input has one JSON argument per line.
"""

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Iterator
from typing import Any

from services.data.readers import Row
from services.data.recipes.base import (
    CODE_TEMPLATE,
    Dropped,
    Fields,
    checked_tests,
    optional,
    text,
    want_language,
)
from volley.data import RecipeOptions

SCORER = "code"
TAGS = ("difficulty", "platform", "month")
TEMPLATE = CODE_TEMPLATE
MAX_TESTS_BYTES = 1 << 29  # most bytes of one problem's private tests, decompressed
_TEXT = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_FRAMING = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"})


def problems(row: Row, options: RecipeOptions) -> Iterator[Fields]:
    """Yield one problem per row."""
    want_language(options, {"python"})
    tests = _tests(row, text(row, "public_test_cases")) + _private(row, optional(row, "private_test_cases") or "")
    metadata = _json(row, "metadata", optional(row, "metadata") or "{}")
    function = metadata.get("func_name") if isinstance(metadata, dict) else None
    functional = {test.get("testtype") == "functional" for test in tests}
    if functional == {True, False}:
        raise Dropped("calls and programs are mixed in one problem")
    called = functional == {True}
    if called and not function:
        raise row.error("tests call a function, but metadata names none")
    yield {
        "id": text(row, "question_id"),
        "problem": text(row, "question_content"),
        "title": str(optional(row, "question_title") or ""),
        "starter": optional(row, "starter_code") or "",
        "tests": checked_tests([_test(row, test, function if called else None) for test in tests], options, 1),
        "function": function or "",
        "reads_stdin": not called,
        "difficulty": str(optional(row, "difficulty") or "?"),
        "platform": str(optional(row, "platform") or "?"),
        "month": str(optional(row, "contest_date") or "?")[:7],
    }


def _test(row: Row, test: dict[str, Any], function: str | None) -> dict[str, Any]:
    given, wanted = test.get("input"), test.get("output")
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise row.error("a test lacks the strings 'input' and 'output': this is not the published layout")
    if function is None:
        return {"stdin": given, "expected": wanted}
    try:
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        return {"function": function, "args": arguments, "expected": json.loads(wanted)}
    except ValueError as error:
        raise Dropped("the arguments of a call are not JSON") from error


def _private(row: Row, raw: str) -> list[dict[str, Any]]:
    if not raw or raw.lstrip().startswith("["):
        return _tests(row, raw or "[]")
    return _tests(row, decode_private(row, raw))


def decode_private(row: Row, raw: str) -> str:
    """Decode base64 of zlib of a pickled string. Nothing is unpickled; only the opcodes are read.

    Raises:
        DataError: ``raw`` is anything else.
    """
    try:
        packed = base64.b64decode(raw, validate=True)
        inflater = zlib.decompressobj()
        data = inflater.decompress(packed, MAX_TESTS_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise row.error(f"private_test_cases: neither JSON nor base64 of zlib ({error})") from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise row.error(f"private_test_cases: truncated, or larger than {MAX_TESTS_BYTES >> 20} MB")
    return pickled_text(row, data)


def pickled_text(row: Row, data: bytes) -> str:
    """Return the string in a pickle of exactly one string; raises `DataError` for any other opcode."""
    try:
        opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(data)]
    except ValueError as error:
        raise row.error(f"private_test_cases: a broken pickle ({error})") from error
    strange = next((name for name, _ in opcodes if name not in _TEXT | _FRAMING), None)
    if strange is not None:
        raise row.error(f"private_test_cases: a pickle with {strange}; it must be a single string")
    found = [str(argument) for name, argument in opcodes if name in _TEXT]
    if len(found) != 1:
        raise row.error(f"private_test_cases: a pickle of {len(found)} strings; it must be a single string")
    return found[0]


def _tests(row: Row, raw: str) -> list[dict[str, Any]]:
    value = _json(row, "test cases", raw)
    if not isinstance(value, list) or not all(isinstance(test, dict) for test in value):
        raise row.error("the test cases are not a list of objects: this is not the published layout")
    return value


def _json(row: Row, what: str, raw: object) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise row.error(f"{what}: not JSON ({error})") from error
