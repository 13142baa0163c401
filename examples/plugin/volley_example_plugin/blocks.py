"""The reader: a file with blocks of ``field: value`` lines, separated by empty lines."""

from collections.abc import Iterator
from pathlib import Path


def read(path: Path) -> Iterator[dict[str, str]]:
    """Yield one row per block; raises ValueError for a line that is not of the form ``field: value``."""
    fields: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, found, value = line.partition(":")
        if found:
            fields[name.strip()] = value.strip()
        elif line.strip():
            raise ValueError(f"line {number}: write 'field: value'")
        elif fields:
            yield fields
            fields = {}
    if fields:
        yield fields
