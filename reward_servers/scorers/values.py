"""Values that left the sandbox, decoded and compared outside with strict types."""

import json
import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]


class Malformed(ValueError):
    """What came out is no value of the harness's encoding."""


def decode(encoded: Any) -> Any:
    """The value that ``harness.encode`` wrote. Raises Malformed; it comes from the program's own process."""
    if encoded is None or isinstance(encoded, bool | str):
        return encoded
    if not (isinstance(encoded, dict) and len(encoded) == 1):
        raise Malformed("not an encoded value")
    ((kind, content),) = encoded.items()
    try:
        return _DECODERS[kind](content)
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise Malformed(f"not a {kind}") from problem


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "list": lambda items: [decode(item) for item in items],
    "tuple": lambda items: tuple(decode(item) for item in items),
    "set": lambda items: {decode(item) for item in items},
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "other": lambda text: Opaque(str(text)),
}


class Opaque:
    """A value of a type that does not travel: equal to nothing."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def read_answer(stdout: bytes) -> tuple[str, Any]:
    """(``value`` or ``compile_error``, content) of the harness's answer. Raises Malformed."""
    try:
        answer = json.loads(stdout)
        if isinstance(answer, dict) and isinstance(answer.get("compile_error"), str):
            return "compile_error", answer["compile_error"]
        if isinstance(answer, dict) and "value" in answer:
            return "value", decode(answer["value"])
    except (ValueError, RecursionError) as problem:
        raise Malformed(f"no answer: {type(problem).__name__}") from problem
    raise Malformed("no answer")


def same(got: Any, wanted: Any, tolerance: float | None = None, *, json_types: bool = False) -> bool:
    """Equality as Python's ``==`` on plain values, except that a bool equals only a bool.

    Args:
        tolerance: floats may differ by this much, absolutely or relative to ``wanted``.
        json_types: ``wanted`` came from JSON, which has no tuples: any sequence is a list, any key may be a string.
    """
    if json_types and isinstance(got, tuple):
        got = list(got)
    if isinstance(got, bool) or isinstance(wanted, bool) or got is None or wanted is None:
        return got is wanted
    if isinstance(got, int | float) and isinstance(wanted, int | float):
        return got == wanted or (tolerance is not None and near(got, wanted, tolerance))
    if type(got) is not type(wanted):
        return False
    if isinstance(got, list | tuple):
        pairs = zip(got, wanted, strict=False)
        return len(got) == len(wanted) and all(same(a, b, tolerance, json_types=json_types) for a, b in pairs)
    if isinstance(got, dict):
        found = {str(key): item for key, item in got.items()} if json_types else got
        return found.keys() == wanted.keys() and all(
            same(found[key], wanted[key], tolerance, json_types=json_types) for key in wanted
        )
    return bool(got == wanted)


def near(got: float, wanted: float, tolerance: float) -> bool:
    """Within ``tolerance``, absolutely or relative to ``wanted``; NaN is near nothing."""
    try:
        return math.isfinite(got) and abs(got - wanted) <= tolerance * max(1.0, abs(wanted))
    except OverflowError:
        return False
