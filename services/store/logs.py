"""The logs of a run's processes: files in its run folder, and the driver's early output, which Ray keeps."""

import codecs
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from volley.patterns import LONG_NAME

DRIVER = "driver"
NAME = LONG_NAME
_TEXT = frozenset({".log", ".out", ".err", ".txt", ".jsonl"})
_CHARACTER = 4  # bytes of the longest one in UTF-8
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes within a character


@dataclass(frozen=True, slots=True)
class LogFile:
    """A process of a run that has a log, and the log's size."""

    process: str
    bytes: int


def log_files(folder: Path) -> list[LogFile]:
    """Return the log files in ``folder/logs``; none if this machine cannot see the folder."""
    try:
        with os.scandir(folder / "logs") as entries:
            found = [
                LogFile(process=_process(each.name), bytes=each.stat(follow_symlinks=False).st_size)
                for each in entries
                if _is_log(each.name) and each.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []
    return sorted(found, key=lambda file: file.process)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a log, and the byte offset at which the next part begins."""

    text: str
    next: int


def read_log(folder: Path, process: str, most: int, offset: int | None = None) -> Piece | None:
    """Read at most ``most`` bytes of a process's log; None if there is no such log.

    Args:
        offset: the byte to begin at; 0 if the log is shorter. None reads the end of the log, beginning at the start of
            a line, or within the last line if that alone is longer than ``most``.
    """
    logs = folder / "logs"
    try:
        files = sorted(file for file in logs.iterdir() if _is_log(file.name) and _process(file.name) == process)
        if not files:
            return None
        descriptor = os.open(files[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        return _end(file, status.st_size, most) if offset is None else _from(file, status.st_size, most, offset)


def _end(file: BinaryIO, size: int, most: int) -> Piece:
    begin = max(0, size - most)
    file.seek(max(0, begin - 1))  # one byte more shows whether a line begins here
    data = file.read(size - file.tell())
    if begin:
        whole = data.partition(b"\n")[2]
        data = whole or data[1:].lstrip(_CONTINUATION)
    text, waiting = _decoded(data)
    return Piece(text, size - waiting)


def _from(file: BinaryIO, size: int, most: int, offset: int) -> Piece:
    begin = offset if offset <= size else 0
    file.seek(begin)
    data = file.read(max(most, _CHARACTER))
    text, waiting = _decoded(data)
    return Piece(text, begin + len(data) - waiting)


def _decoded(data: bytes) -> tuple[str, int]:
    """Return the text, and how many bytes at the end belong to an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, len(decoder.getstate()[0])


def _is_log(name: str) -> bool:
    return Path(name).suffix in _TEXT and re.match(NAME, _process(name)) is not None


def _process(name: str) -> str:
    return name.removesuffix(".log")
