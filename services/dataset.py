"""Prompts from JSONL, and the endless seeded order in which a run meets them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from volley.errors import DataError, JobError
from volley.job import DataSpec
from volley.records import Prompt


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of every row; blank lines are passed over.

    Raises:
        JobError: the file can not be read.
        DataError: a line is not a JSON object in UTF-8.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(path, number, line)
    except OSError as error:
        raise JobError(f"data file {path}: {error.strerror or error}") from error


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(path, number, f"not UTF-8 at byte {error.start}: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            path, number, f"not JSON ({error.msg}, column {error.colno}): write one object a line"
        ) from error
    except ValueError as error:
        raise DataError(path, number, f"not usable JSON: {error}") from error
    except RecursionError as error:
        raise DataError(path, number, "nested too deeply") from error
    if not isinstance(row, dict):
        raise DataError(path, number, f"a {type(row).__name__}, not an object: write {{...}}")
    return row


def text_field(path: Path, number: int, row: dict[str, Any], name: str) -> str:
    """The row's non-empty text under ``name``; raises `DataError` where there is none."""
    value = row.get(name)
    if value is None:
        raise DataError(path, number, f"no field '{name}'; the row has {', '.join(map(repr, row)) or 'no fields'}")
    if not isinstance(value, str):
        raise DataError(path, number, f"field '{name}' is a {type(value).__name__}, not a text")
    if not value:
        raise DataError(path, number, f"field '{name}' is empty")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(path, number, f"field '{name}' has half a surrogate pair, which no tokenizer takes")
    return value


def read_prompts(spec: DataSpec) -> list[Prompt]:
    """Every row of the file as a `Prompt`; raises `DataError` for the first row that is not one."""
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in read_rows(spec.path):
        text = text_field(spec.path, number, row, spec.prompt_field)
        name = f"{spec.path.stem}:{number}"
        if spec.id_field is not None:
            if not isinstance(row.get(spec.id_field), str | int):
                raise DataError(spec.path, number, f"field '{spec.id_field}' must hold an id: text or number")
            name = str(row[spec.id_field])
        if name in seen:
            raise DataError(spec.path, number, f"id {name!r} is already that of line {seen[name]}")
        seen[name] = number
        prompts.append(Prompt(name, text, {key: value for key, value in row.items() if key != spec.prompt_field}))
    if not prompts:
        raise JobError(f"data file {spec.path} has no rows")
    return prompts


class Order:
    """The endless order in which a run meets ``count`` rows: pass after pass, each shuffled by a seed of its own.

    ``order[position]`` is a row number; it depends on nothing but the position, the seed and the count.
    """

    def __init__(self, count: int, *, seed: int, shuffle: bool) -> None:
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._passes: dict[int, NDArray[np.int64]] = {}

    def __getitem__(self, position: int) -> int:
        number, offset = divmod(position, self.count)
        if not self.shuffle:
            return offset
        if number not in self._passes:
            self._passes = {key: rows for key, rows in self._passes.items() if key == number - 1}
            self._passes[number] = np.random.default_rng([self.seed, number]).permutation(self.count)
        return int(self._passes[number][offset])
