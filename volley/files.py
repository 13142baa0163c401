"""Replace files and folders atomically: a reader sees the old content or the new, even after a crash.

New content is written beside the target, synced to disk and renamed over it. What a crash leaves behind is a hidden
``.<name>.partial``, which the next writer removes.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from volley.errors import HostError

FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: Exception | str) -> bool:
    """Return whether ``error`` says that the disk or a quota is full; libraries raise errors of their own."""
    return getattr(error, "errno", None) in FULL or any(os.strerror(each) in str(error) for each in FULL)


def partial_path(path: Path) -> Path:
    """Return where the next content of ``path`` is written: in the same folder, under a hidden name."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` when the block ends; if the block raises, ``path`` stays as it is.

    Args:
        mode: permissions of the new file, reduced by the umask.
    """
    partial = partial_path(path)
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace the content of ``path`` by ``text``; see `replacing`."""
    with replacing(path, mode=mode) as file:
        file.write(text.encode())


def empty_folder(path: Path) -> None:
    """Make ``path`` an empty folder, removing what is there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def replace_folder(partial: Path, folder: Path) -> None:
    """Sync everything in ``partial`` to disk and rename it to ``folder``, which is removed first if it exists."""
    for file in (path for path in partial.rglob("*") if path.is_file()):
        sync(file)
    sync(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def check_new(folder: Path) -> None:
    """Raise `HostError` if ``folder`` is a file, or a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HostError(f"{folder} exists already: choose another folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``folder`` when the block ends; if the block raises, nothing is left of it.

    Raises:
        HostError: ``folder`` exists already, or cannot be written.
    """
    check_new(folder)
    partial = partial_path(folder)
    try:
        empty_folder(partial)
        yield partial
        if folder.exists():
            folder.rmdir()  # fails if somebody filled it meanwhile
        replace_folder(partial, folder)
    except OSError as error:
        raise HostError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file, or the entries of a folder, from the page cache to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
