"""JSON that others wrote: of bounded depth, so that walking it cannot fail, and with text that can be encoded."""

import json
from typing import Any

MAX_DEPTH = 100


def parse_json(text: str) -> Any:
    """The value of ``text``.

    Raises:
        ValueError: it is not JSON, is nested more than `MAX_DEPTH` deep, or has half a surrogate pair in a text or key.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(value)
    return value


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def _check(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for each in level:
            if isinstance(each, str) and not _can_be_encoded(each):
                raise ValueError(f"it has half a surrogate pair, which no tokenizer accepts, in {each!a:.60}")
        level = [part for each in level if isinstance(each, list | dict) for part in _parts(each)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _parts(value: list[Any] | dict[str, Any]) -> list[Any]:
    return value if isinstance(value, list) else [*value, *value.values()]


def _can_be_encoded(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
