"""Writes to a full disk are repeated, and the run says so for as long as one of them waits."""

import asyncio
import errno
from collections.abc import Awaitable, Callable

import pytest

from services.recording import disk_space
from services.recording.disk_space import DiskGuard
from volley.errors import DiskFull, HostError


class Disk:
    """A guard, what it reported, and a disk whose space tests set."""

    def __init__(self) -> None:
        self.reported: list[str] = []
        self.space = 0
        self.guard = DiskGuard(self._report)

    def paused(self) -> bool:
        return bool(self.guard.problem)

    async def _report(self, problem: str) -> None:
        self.reported.append(problem)

    def writing(self, needed: int, full: Callable[[], Exception]) -> Callable[[], Awaitable[int]]:
        async def write() -> int:
            if self.space < needed:
                raise full()
            return needed

        return write


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def full() -> DiskFull:
    return DiskFull("checkpoint step-5")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(disk_space, "RETRY_SECONDS", 0.001)
    return Disk()


async def test_two_writes_that_wait_are_reported_once_until_both_are_done(disk: Disk) -> None:
    rows = asyncio.create_task(disk.guard.retry_while_full(disk.writing(1, no_space)))
    checkpoint = asyncio.create_task(disk.guard.retry_while_full(disk.writing(2, full)))
    await asyncio.sleep(0.01)
    assert len(disk.reported) == 1
    disk.space = 1
    assert await rows == 1
    assert "the disk is full" in disk.guard.problem
    disk.space = 2
    assert await checkpoint == 2
    assert (disk.guard.problem, disk.reported[1:]) == ("", [""])


@pytest.mark.parametrize("ends", ["cancelled", "fails"])
async def test_a_write_that_gives_up_no_longer_waits(disk: Disk, ends: str) -> None:
    problems: list[Exception] = [full()]
    waiting = asyncio.create_task(disk.guard.retry_while_full(disk.writing(1, lambda: problems[-1])))
    await asyncio.sleep(0.01)
    assert disk.paused()
    if ends == "cancelled":
        waiting.cancel()
    else:
        problems.append(HostError("read-only file system"))
    with pytest.raises((HostError, asyncio.CancelledError)):
        await waiting
    assert not disk.paused()
    again = asyncio.create_task(disk.guard.retry_while_full(disk.writing(1, full)))
    await asyncio.sleep(0.01)
    assert disk.paused(), "a full disk is reported again"
    disk.space = 1
    await again
    assert not disk.paused()
