"""Bounds on calls that hold for all reward workers of a run.

    call ── a free slot of ``max_concurrent`` ── the next moment of ``max_per_s`` ──> begins

A slot is a locked file; the next moment is the content of another. The kernel frees the locks of a process that dies.
Workers on hosts that do not share the folder bound their calls separately.
"""

import asyncio
import contextlib
import fcntl
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from volley.errors import HostError

POLL_SECONDS = 0.02


class Limits:
    """Lets calls begin only as the bounds allow.

    Args:
        folder: shared by the processes for which the bounds hold together; None: this process alone.
        max_concurrent: calls under way at once; None: any number.
        max_per_s: calls begun per second, evenly spaced; None: any number.

    Raises:
        HostError: the folder's file system has no file locks.
    """

    def __init__(self, folder: Path | None, max_concurrent: int | None, max_per_s: float | None) -> None:
        self._folder, self._most = folder, max_concurrent
        self._spacing_s = None if max_per_s is None else 1.0 / max_per_s
        self._next = 0.0  # time.time() from which the next call may begin, without a folder
        self._here = asyncio.Semaphore(max_concurrent or 1)
        self._asking = asyncio.Lock()  # one caller per process asks for a slot, the others wait in line
        self._pacing = asyncio.Lock()  # and likewise for the next moment
        if folder is not None and (max_concurrent or max_per_s):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with _locked(folder / "probe"):
                    pass
            except OSError as problem:
                raise HostError(
                    f"{folder} cannot hold the file locks that max_concurrent and max_per_s need: {problem}"
                ) from problem

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until one more call may begin; it ends with the block. Raises OSError if the folder is gone."""
        async with self._slot():
            await self._pace()
            yield

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._most is None:
            yield
            return
        async with self._here:
            if self._folder is None:
                yield
                return
            async with self._asking:
                while (slot := _free_slot(self._folder, self._most)) is None:  # noqa: ASYNC110 - locks have no event
                    await asyncio.sleep(POLL_SECONDS * (1 + random.random()))
            try:
                yield
            finally:
                os.close(slot)

    async def _pace(self) -> None:
        async with self._pacing:
            while (wait := self._wait_s()) > 0:  # noqa: ASYNC110 - another process may be first
                await asyncio.sleep(wait)

    def _wait_s(self) -> float:
        """Seconds until one may ask again; 0 if the call may begin, which the next one then has to wait for."""
        if self._spacing_s is None:
            return 0.0
        if self._folder is None:
            wait, self._next = _begin(self._next, self._spacing_s)
            return wait
        with _locked(self._folder / "next_call") as file:
            if file is None:
                return POLL_SECONDS * random.random()
            wait, at = _begin(_number(os.pread(file, 64, 0)), self._spacing_s)
            if not wait:
                os.pwrite(file, f"{at:<32.6f}".encode(), 0)
            return wait


def _begin(next_call: float, spacing_s: float) -> tuple[float, float]:
    """How long a call must wait, and the time from which the next may begin; a clock set back stops nothing."""
    now = time.time()
    wait = next_call - now
    return (wait, next_call) if 0 < wait <= spacing_s else (0.0, now + spacing_s)


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:  # a new file
        return 0.0


def _free_slot(folder: Path, most: int) -> int | None:
    """The descriptor of a slot that is held until it is closed, or None if others hold all of them."""
    first = random.randrange(most)
    for index in range(most):
        descriptor = os.open(folder / f"slot-{(first + index) % most}", os.O_RDWR | os.O_CREAT, 0o644)
        if _lock(descriptor):
            return descriptor
        os.close(descriptor)
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """The descriptor of the locked file, or None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield descriptor if _lock(descriptor) else None
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock the file unless it is locked; locks belong to the open file, so two in one process exclude each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
