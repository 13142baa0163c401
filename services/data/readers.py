"""Reads rows of local files: JSON lines, JSON, CSV, TSV, Parquet; also compressed as gz, zst or a zip of one file.

Readers stream. Malformed rows are passed to ``bad``; an error that makes the rest of the file unreadable is raised.
"""

import csv
import datetime
import decimal
import gzip
import io
import json
import math
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from volley.errors import DataError, JobError

if TYPE_CHECKING:
    import pyarrow

MAX_LINE = 1 << 29  # most bytes of one row; LiveCodeBench problems have up to about 10 MB
COMPRESSIONS = (".gz", ".zst", ".zip")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its file, its line from 1 (for Parquet and JSON its number), and its fields."""

    path: Path
    number: int
    fields: dict[str, Any]
    unnamed: bool = False  # the names come from the first line of a table, which may be data instead

    def columns(self) -> str:
        """List the field names for an error message; only their number if the names may be someone's data."""
        if self.unnamed:
            return f"{len(self.fields)} columns: check that the first line names them"
        return ", ".join(map(repr, self.fields)) or "no fields"

    def error(self, problem: str) -> DataError:
        return DataError(self.path, self.number, problem)


JSON_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def called(value: object) -> str:
    """Return the type of a JSON value in words."""
    return "null" if value is None else JSON_NAMES.get(type(value), f"of type {type(value).__name__}")


Bad = Callable[[DataError], None]


def refuse(error: DataError) -> None:
    """The strict ``bad``: raise at the first malformed row."""
    raise error


def format_of(path: Path) -> str:
    """Return ``jsonl``, ``json``, ``csv``, ``tsv`` or ``parquet`` by extension; raises `JobError` for any other."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    known = {
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
        ".json": "json",
        ".csv": "csv",
        ".tsv": "tsv",
        ".parquet": "parquet",
    }
    if not suffixes or suffixes[-1] not in known:
        raise JobError(f"data file {path}: unknown extension; set format to jsonl, json, csv, tsv or parquet")
    return known[suffixes[-1]]


def read_file(path: Path, kind: str = "auto", bad: Bad = refuse) -> Iterator[Row]:
    """Yield the rows of one file in order.

    Args:
        kind: a format as in `format_of`, or ``auto``.
        bad: called with each malformed row; reading continues if it returns.

    Raises:
        JobError: the file cannot be read.
        DataError: a row is malformed and ``bad`` raises, or the rest of the file is broken.
    """
    kind = format_of(path) if kind == "auto" else kind
    try:
        if kind == "parquet":
            yield from _parquet(path)
            return
        with open_bytes(path) as stream:
            match kind:
                case "jsonl":
                    yield from _json_lines(path, stream, bad)
                case "json":
                    yield from _json(path, stream, bad)
                case _:
                    yield from _csv(path, stream, "\t" if kind == "tsv" else ",", bad)
    except (gzip.BadGzipFile, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise JobError(f"data file {path}: it is truncated or not a {path.suffix} file ({error})") from error
    except OSError as error:
        raise JobError(f"data file {path}: {error.strerror or error}") from error


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open the file for reading bytes, decompressed according to its extension."""
    match path.suffix.lower():
        case ".gz":
            with gzip.open(path) as stream:
                yield stream  # type: ignore[misc]
        case ".zst":
            import pyarrow

            with pyarrow.input_stream(str(path), compression="zstd") as raw, io.BufferedReader(raw) as stream:
                yield stream
        case ".zip":
            with zipfile.ZipFile(path) as archive, archive.open(_only_member(path, archive)) as stream:
                yield stream
        case _:
            with path.open("rb") as stream:
                yield stream


def _only_member(path: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if len(names) != 1:
        raise JobError(f"data file {path}: the zip has {len(names)} files; unpack it and name one of them")
    return names[0]


def _json_lines(path: Path, stream: IO[bytes], bad: Bad) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise DataError(path, number, f"the line is longer than {MAX_LINE >> 20} MB: write one row per line")
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        try:
            yield Row(path, number, _object(path, number, line.rstrip(b"\r\n")))
        except DataError as error:
            bad(error)


def _object(path: Path, number: int, text: bytes) -> dict[str, Any]:
    value = parse_json(path, number, text, "write one object per line")
    if not isinstance(value, dict):
        raise DataError(path, number, f"{called(value)}, not an object: write {{...}}")
    return value


def parse_json(path: Path, number: int, text: bytes, advice: str) -> Any:
    """Parse JSON. Raises `DataError`, also for NaN, infinities and duplicate keys."""
    try:
        return _DECODER.decode(text.decode(json.detect_encoding(text), "surrogatepass"))
    except UnicodeDecodeError as error:
        raise DataError(path, number, f"not UTF-8 at byte {error.start}: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        raise DataError(path, number, f"not JSON ({error.msg}, {where}): {advice}") from error
    except ValueError as error:
        raise DataError(path, number, f"not usable JSON: {error}") from error
    except RecursionError as error:
        raise DataError(path, number, "nested too deeply") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; write null")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` that raises ValueError for duplicate keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the key {twice!r} appears twice in one object; remove one")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_no_constant)


def _json(path: Path, stream: IO[bytes], bad: Bad) -> Iterator[Row]:
    text = stream.read().removeprefix(BOM)
    if not text.strip():
        return
    value = parse_json(path, 1, text, "write a list of objects: [{...}, {...}]")
    if isinstance(value, dict):
        yield Row(path, 1, value)
        return
    if not isinstance(value, list):
        raise DataError(path, 1, f"{called(value)}, not a list of objects: write [{{...}}, {{...}}]")
    for number, item in enumerate(value, 1):
        if isinstance(item, dict):
            yield Row(path, number, item)
        else:
            bad(DataError(path, number, f"{called(item)}, not an object: write {{...}}"))


def _csv(path: Path, stream: IO[bytes], delimiter: str, bad: Bad) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, MAX_LINE))
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    try:
        for cells in lines:
            if not cells:
                continue
            if header is None:
                header = _header(path, cells)
            elif len(cells) == len(header):
                yield Row(path, lines.line_num, dict(zip(header, cells, strict=True)), unnamed=True)
            else:
                bad(DataError(path, lines.line_num, f"{len(cells)} cells under {len(header)} headings"))
    except UnicodeDecodeError as error:
        raise DataError(path, lines.line_num + 1, "not UTF-8: save the file as UTF-8") from error
    except csv.Error as error:
        raise DataError(path, lines.line_num, f"not CSV: {error}") from error
    finally:
        text.close()


def _header(path: Path, cells: list[str]) -> list[str]:
    if len(set(cells)) < len(cells) or not all(cells):
        raise DataError(path, 1, "the first line must name every column, without duplicates")
    return cells


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            simple = all(is_plain(field.type) for field in file.schema_arrow)
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(path, number, fields if simple else plain(fields))
    except pyarrow.ArrowException as error:
        raise DataError(path, number + 1, f"not Parquet: {' '.join(str(error).split())[:200]}") from error


def is_plain(kind: "pyarrow.DataType") -> bool:
    """Return whether the Python values of an Arrow type are already JSON values."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(is_plain(kind.field(index).type) for index in range(kind.num_fields))
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind) or types.is_boolean(kind)
    )


def plain(value: object) -> Any:
    """Convert ``value`` to a JSON value; NaN, which data frames use for missing numbers, becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return value
