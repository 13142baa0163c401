"""Folders for sockets and the like, that end with the process they belong to: what a killed one left, the next removes.

A folder is in use as long as a process holds the lock on its file `OWNER`; the kernel gives the lock up when the
process ends, however it ends.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "volley-"
OWNER = ".owner"


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A folder with a short name, as sockets need, that nobody else can enter; removed at the end of the block."""
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-"))
    lock = own(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # another process may write its last line there
        os.close(lock)


def own(folder: Path) -> int:
    """Make ``folder`` this process's own, and remove those in the same place that nobody owns any more.

    Returns:
        A descriptor: the folder is owned until it is closed, here and in what this process forked.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = folder / f"{OWNER}.partial"  # nobody may find the file before it is locked
    lock = os.open(aside, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    aside.rename(folder / OWNER)
    sweep(folder.parent)
    return lock


def sweep(parent: Path) -> list[Path]:
    """Remove the folders of `own` in ``parent`` whose owner has ended, of this account; returns them."""
    return [folder for folder in sorted(parent.glob(f"{PREFIX}*")) if _abandoned(folder)]


def _abandoned(folder: Path) -> bool:
    """Remove the folder unless it is in use, or none of ours."""
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return False
        lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)
