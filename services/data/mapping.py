"""Applies a job's settings to a row's fields: renaming, JSON decoding, filters, tags. Nothing here evaluates code."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from services.data.readers import Row, unique_keys
from volley.data import FilterSpec, SourceSpec

MISSING = object()


def look_up(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path``, a field name or names joined by dots, or `MISSING` if there is none."""
    if path in fields:
        return fields[path]
    value: object = fields
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def mapped(spec: SourceSpec, row: Row) -> dict[str, Any]:
    """Return the row's fields, plus those the job renames, with JSON strings decoded. Raises `DataError`."""
    fields = dict(row.fields)
    for name, path in spec.fields.items():
        value = look_up(row.fields, path)
        if value is MISSING:
            raise row.error(f"no field '{path}'; the row has {row.columns()}")
        fields[name] = value
    for name in spec.json_fields:
        value = fields.get(name)
        if isinstance(value, str):
            try:
                fields[name] = json.loads(value, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                raise row.error(f"field '{name}' is not JSON: {error}") from error
    return fields


def failed_filter(filters: tuple[FilterSpec, ...], fields: Mapping[str, Any]) -> FilterSpec | None:
    """Return the first filter that drops the row, or None if all keep it."""
    return next((each for each in filters if not _keeps(each, look_up(fields, each.field))), None)


def describe(each: FilterSpec) -> str:
    """Describe the filter as the reason for a drop."""
    return f"filter {each.field} {each.op} {json.dumps(each.value)}"


def _keeps(each: FilterSpec, value: object) -> bool:
    missing = value is MISSING or value is None
    if each.op == "present":
        return missing is (each.value is False)
    if missing:
        return (
            (each.op == "!=" and each.value is not None)
            or (each.op == "==" and each.value is None)
            or (each.op == "not in")
        )
    return _OPERATIONS[each.op](value, each.value)


def _equal(value: object, wanted: object) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    number = as_number(value) if isinstance(wanted, int | float) else None
    return bool(value == wanted if number is None else number == wanted)


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def check(value: object, wanted: object) -> bool:
        if isinstance(wanted, str):
            return isinstance(value, str) and compare(value, wanted)
        number = as_number(value)
        return number is not None and compare(number, wanted)

    return check


def _contains(value: object, wanted: object) -> bool:
    if isinstance(value, str):
        return str(wanted) in value
    return isinstance(value, list | tuple) and any(_equal(item, wanted) for item in value)


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, str | list | tuple | dict) else None


_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": _equal,
    "!=": lambda value, wanted: not _equal(value, wanted),
    "<": _ordered(lambda a, b: bool(a < b)),
    "<=": _ordered(lambda a, b: bool(a <= b)),
    ">": _ordered(lambda a, b: bool(a > b)),
    ">=": _ordered(lambda a, b: bool(a >= b)),
    "in": lambda value, wanted: any(_equal(value, item) for item in wanted),
    "not in": lambda value, wanted: not any(_equal(value, item) for item in wanted),
    "contains": _contains,
    "length >=": lambda value, wanted: (size := _length(value)) is not None and size >= wanted,
    "length <=": lambda value, wanted: (size := _length(value)) is not None and size <= wanted,
}


def as_number(value: object) -> float | int | None:
    """Return a number, or the number that a string spells; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    return None


def tags_of(names: tuple[str, ...], row: Row, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the row's tags as strings, with list items joined by commas. Raises `DataError` for an object."""
    tags = {}
    for name in names:
        value = look_up(fields, name)
        if value is MISSING or value is None:
            continue
        if isinstance(value, dict):
            raise row.error(f"tag '{name}' is an object; name one of its fields: {name}.{next(iter(value), 'field')}")
        tags[name] = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return tags
