"""Decodes and compares values returned from the sandbox, with strict types and in bounded time.

The program controls every bit of these values. So nothing here hashes them (colliding hashes would make a set
quadratic), prints integers of unbounded size, or assumes that a value can be printed at all.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from reward_servers.sandbox.time_limit import tick

Check = Callable[[Any], bool]
PRINTED_BITS = 256


class Malformed(ValueError):
    """The output is not a value in the encoding of ``harness.py``."""


@dataclass(frozen=True, slots=True)
class SetItems:
    """A set, held as a list of its items."""

    items: list[Any]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class DictItems:
    """A dict, held as a list of its (key, value) pairs."""

    items: list[tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value whose type has no encoding; it equals nothing."""

    text: str


def read_answer(stdout: bytes) -> tuple[str, Any]:
    """Parse the harness's answer into (``value`` or ``compile_error``, content). Raises Malformed."""
    try:
        answer = json.loads(
            stdout, object_pairs_hook=_only_pair, parse_int=_refuse, parse_float=_refuse, parse_constant=_refuse
        )
        match answer:
            case ("compile_error", str(text)):
                return "compile_error", text
            case ("value", encoded):
                return "value", decode(encoded)
    except (ValueError, RecursionError) as problem:
        raise Malformed(f"no valid answer: {type(problem).__name__}") from problem
    raise Malformed("no valid answer")


def _only_pair(pairs: list[tuple[str, Any]]) -> tuple[str, Any]:
    """Turn a JSON object, which has one key in this encoding, into a tuple, which no JSON list becomes."""
    if len(pairs) != 1:
        raise Malformed("an object must have exactly one key")
    return pairs[0]


def _refuse(text: str) -> NoReturn:
    raise Malformed("a number without its type")


def decode(encoded: object) -> Any:
    """Decode a value of ``harness.encode``, as parsed by `read_answer`. Raises Malformed or RecursionError."""
    tick()
    if encoded is None or isinstance(encoded, bool | str):
        return encoded
    if not isinstance(encoded, tuple):
        raise Malformed("not an encoded value")
    kind, content = encoded
    try:
        return _DECODERS[kind](content)
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise Malformed(f"not a {shown(kind)}") from problem


def _opaque(text: object) -> Opaque:
    if not isinstance(text, str):
        raise Malformed("not a string")
    return Opaque(text)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "list": lambda items: [decode(item) for item in items],
    "tuple": lambda items: tuple(decode(item) for item in items),
    "set": lambda items: SetItems([decode(item) for item in items]),
    "dict": lambda pairs: DictItems([(decode(key), decode(item)) for key, item in pairs]),
    "other": _opaque,
}


def same(got: object, wanted: object, tolerance: float | None = None, *, json_types: bool = False) -> bool:
    """Compare plain values like Python's ``==``, except that a bool equals only a bool.

    Args:
        got: a decoded value.
        wanted: the trusted value: a Python literal or JSON.
        tolerance: allowed difference between numbers, absolute or relative to ``wanted``.
        json_types: ``wanted`` is JSON, which has no tuples and only string keys: tuples equal lists, and keys are
            compared as strings.
    """
    tick()
    if isinstance(got, bool) or isinstance(wanted, bool) or got is None or wanted is None:
        return got is wanted
    if isinstance(got, int | float) and isinstance(wanted, int | float):
        return got == wanted or (tolerance is not None and near(got, wanted, tolerance))
    if json_types and isinstance(got, tuple):
        got = list(got)
    if isinstance(got, SetItems):
        return isinstance(wanted, set) and _same_items(got.items, list(wanted))
    if isinstance(got, DictItems):
        return isinstance(wanted, dict) and _same_dicts(got, wanted, tolerance, json_types=json_types)
    if isinstance(got, Opaque) or type(got) is not type(wanted):
        return False
    if isinstance(got, list | tuple) and isinstance(wanted, list | tuple):
        pairs = zip(got, wanted, strict=False)
        return len(got) == len(wanted) and all(same(a, b, tolerance, json_types=json_types) for a, b in pairs)
    return bool(got == wanted)


def _same_items(got: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(got) == len(wanted) and sorted(map(_key, got)) == sorted(map(_key, wanted))


def _same_dicts(got: DictItems, wanted: dict[Any, Any], tolerance: float | None, *, json_types: bool) -> bool:
    name = _json_key if json_types else _key
    left = {name(key): item for key, item in wanted.items()}
    if len(got) != len(left):
        return False
    for key, item in got.items:
        known = name(key)
        if known not in left or not same(item, left.pop(known), tolerance, json_types=json_types):
            return False
    return True


def _key(value: object) -> str:
    """Return a text that is the same for equal values and different for all others."""
    tick()
    if isinstance(value, complex) and not value.imag:
        value = value.real
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    match value:
        case bool() | None:
            return str(value)
        case int():
            return hex(value)
        case float():
            return value.hex()
        case complex():
            return f"({_key(value.real)} {_key(value.imag)})"
        case str():
            return f"s{len(value)}:{value}"
        case bytes():
            return f"b{value.hex()}"
        case list() | tuple():
            return f"{type(value).__name__}({','.join(map(_key, value))})"
        case SetItems():
            return f"set({','.join(sorted(map(_key, value.items)))})"
        case set() | frozenset():
            return f"set({','.join(sorted(map(_key, value)))})"
        case DictItems():
            return f"dict({','.join(sorted(f'{_key(key)}={_key(item)}' for key, item in value.items))})"
    return f"?{type(value).__name__}"


def _json_key(key: object) -> str:
    """Return a dict key as a string, since JSON has no other keys."""
    return key if isinstance(key, str) else shown(key)


def near(got: float, wanted: float, tolerance: float) -> bool:
    """Return whether ``got`` is within ``tolerance``, absolute or relative to ``wanted``.

    NaN is near nothing, infinity only near itself.
    """
    if got == wanted:
        return True
    try:
        finite = math.isfinite(got) and math.isfinite(wanted)
        return finite and abs(got - wanted) <= tolerance * max(1.0, abs(wanted))
    except OverflowError:
        return False


def shown(value: object, limit: int = 80) -> str:
    """Format any value for display in at most ``limit`` characters."""
    text = _shown(value, limit)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _shown(value: object, room: int) -> str:
    match value:
        case bool() | None | float() | complex():
            return repr(value)
        case int():
            bits = value.bit_length()
            return str(value) if bits <= PRINTED_BITS else f"an integer of {bits} bits"
        case str() | bytes():
            return repr(value[:room])
        case list():
            return f"[{_listed(value, room)}]"
        case tuple():
            return f"({_listed(value, room)}{',' if len(value) == 1 else ''})"
        case SetItems():
            return f"{{{_listed(value.items, room)}}}" if value.items else "set()"
        case DictItems():
            return f"{{{_listed(value.items, room, ': ')}}}"
        case Opaque():
            return value.text[:room]
    return f"a value of type {type(value).__name__}"


def _listed(items: Sequence[Any], room: int, between: str = "") -> str:
    """Format the first items, as many as fit into ``room`` characters."""
    text = ""
    for at, item in enumerate(items):
        if len(text) >= room:
            return text
        text += ", " * (at > 0)
        parts = item if between else (item,)
        text += between.join(_shown(part, max(0, room - len(text) - 1)) for part in parts)
    return text
