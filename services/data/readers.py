"""Rows of local files: JSON lines, JSON, CSV, TSV, Parquet; each also compressed as gz, zst or a zip of one file.

A reader streams. A row that is malformed goes to ``bad``; what makes the rest unreadable is raised.
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
from typing import IO, Any, NoReturn

from volley.errors import DataError, JobError

MAX_LINE = 1 << 29  # bytes of one row; a LiveCodeBench problem takes up to some 10 MB
COMPRESSIONS = (".gz", ".zst", ".zip")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the file and line (from 1; for Parquet and JSON the row) it is at, and its fields."""

    path: Path
    number: int
    fields: dict[str, Any]
    unnamed: bool = False  # by their format alone the names may be cells of a row: a table's first line

    def columns(self) -> str:
        """The names of the fields in words, or how many there are where a name may be somebody's data."""
        if self.unnamed:
            return f"{len(self.fields)} columns: see that the first line names them"
        return ", ".join(map(repr, self.fields)) or "no fields"

    def error(self, problem: str) -> DataError:
        return DataError(self.path, self.number, problem)


JSON_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def called(value: Any) -> str:
    """What a JSON value is, in words."""
    return "null" if value is None else JSON_NAMES.get(type(value), f"of type {type(value).__name__}")


Bad = Callable[[DataError], None]


def refuse(error: DataError) -> None:
    """The strict ``bad``: the first malformed row ends the reading."""
    raise error


def format_of(path: Path) -> str:
    """``jsonl``, ``json``, ``csv``, ``tsv`` or ``parquet`` by extension; raises `JobError` for another one."""
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
        raise JobError(f"data file {path}: unknown kind of file; say format: jsonl, json, csv, tsv or parquet")
    return known[suffixes[-1]]


def read_file(path: Path, kind: str = "auto", bad: Bad = refuse) -> Iterator[Row]:
    """Rows of one file in order.

    Args:
        kind: as `format_of` names it, or ``auto``.
        bad: told of each malformed row; reading goes on if it returns.

    Raises:
        JobError: the file can not be read.
        DataError: a row is malformed and ``bad`` says so, or the file is broken from there on.
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
        raise JobError(f"data file {path}: it is cut off or no {path.suffix} file ({error})") from error
    except OSError as error:
        raise JobError(f"data file {path}: {error.strerror or error}") from error


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed by extension."""
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
        raise JobError(f"data file {path}: a zip with {len(names)} files; unpack it and name one")
    return names[0]


def _json_lines(path: Path, stream: IO[bytes], bad: Bad) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise DataError(path, number, f"a line of over {MAX_LINE >> 20} MB: one row a line, please")
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        try:
            yield Row(path, number, _object(path, number, line.rstrip(b"\r\n")))
        except DataError as error:
            bad(error)


def _object(path: Path, number: int, text: bytes) -> dict[str, Any]:
    value = parse_json(path, number, text, "write one object a line")
    if not isinstance(value, dict):
        raise DataError(path, number, f"{called(value)}, not an object: write {{...}}")
    return value


def parse_json(path: Path, number: int, text: bytes, advice: str) -> Any:
    """The value; NaN, infinities and a key that is written twice are refused. Raises `DataError`."""
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
    raise ValueError(f"{name} is no JSON value; write null")


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: the object; raises ValueError where a key is written twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the key {twice!r} is written twice in one object; drop one")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=each_key_once, parse_constant=_no_constant)  # made once: rows are many


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
        raise DataError(path, 1, "the first line must name every column, each once")
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


def is_plain(kind: Any) -> bool:
    """True for an Arrow type whose Python values are JSON as they are."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(is_plain(kind.field(index).type) for index in range(kind.num_fields))
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind) or types.is_boolean(kind)
    )


def plain(value: Any) -> Any:
    """``value`` as JSON knows it: NaN, which is how data frames write a missing number, becomes None."""
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
