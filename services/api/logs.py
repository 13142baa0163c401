"""What the processes of a run said: files in its run folder, and the driver's first words, which Ray keeps."""

import os
import re
import stat
from pathlib import Path

from services.api.schemas import LogFile

DRIVER = "driver"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_TEXT = frozenset({".log", ".out", ".err", ".txt", ".jsonl"})


def log_files(folder: Path) -> list[LogFile]:
    """The files in ``folder/logs``; none where this server does not see the folder."""
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


def tail(folder: Path, process: str, most: int) -> str | None:
    """The last ``most`` bytes of a process's log, from the beginning of a line; None where there is none."""
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
        begin = max(0, status.st_size - most)
        file.seek(begin)
        text = file.read(most).decode("utf-8", errors="replace")
    return text.partition("\n")[2] if begin and "\n" in text else text


def _is_log(name: str) -> bool:
    return Path(name).suffix in _TEXT and re.match(NAME, _process(name)) is not None


def _process(name: str) -> str:
    return name.removesuffix(".log")
