"""Temporary folders, for sockets and the like, that do not outlive their process for long.

A process that is killed leaves its folder behind, and the next process to call `own` removes it. A folder is in use
while a process holds the lock on its file `OWNER`; the kernel releases the lock however that process ends.
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
    """A private folder with a short name, as sockets need; it is removed at the end of the block."""
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-"))
    lock = own(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # another process may still be writing there
        os.close(lock)


def own(folder: Path) -> int:
    """Make this process the owner of ``folder``, and remove abandoned folders beside it.

    Returns:
        A file descriptor. The process owns the folder until it closes this, and its forked children close theirs.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = folder / f"{OWNER}.partial"  # so that no other process finds the file before it is locked
    lock = os.open(aside, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    aside.rename(folder / OWNER)
    sweep(folder.parent)
    return lock


def sweep(parent: Path) -> list[Path]:
    """Remove this user's folders in ``parent`` whose owner has ended; returns them."""
    return [folder for folder in sorted(parent.glob(f"{PREFIX}*")) if _abandoned(folder)]


def _abandoned(folder: Path) -> bool:
    """Remove the folder unless it is in use or belongs to somebody else; returns True if it was removed."""
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
