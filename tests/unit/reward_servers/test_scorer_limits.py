"""Bounds on calls, in one process and over a shared folder."""

import asyncio
import time
from pathlib import Path

import pytest

from reward_servers.scorers.limits import Limits
from volley.errors import HostError


@pytest.mark.parametrize("shared", [True, False])
async def test_calls_begin_no_faster_than_the_rate(tmp_path: Path, shared: bool) -> None:
    folder = tmp_path if shared else None
    first = Limits(folder, None, 100.0)
    second = Limits(folder, None, 100.0) if shared else first  # as another worker has it
    begins: list[float] = []

    async def call(limits: Limits) -> None:
        async with limits.turn():
            begins.append(time.monotonic())

    began = time.monotonic()
    await asyncio.gather(*(call(limits) for limits in (first, second) for _ in range(10)))
    assert max(begins) - began >= 19 / 100 - 0.001, "the first begins at once, the others 10 ms apart"


async def test_a_clock_that_is_set_back_stops_no_call(tmp_path: Path) -> None:
    (tmp_path / "next_call").write_text(f"{time.time() + 3600}")
    async with asyncio.timeout(5), Limits(tmp_path, None, 1.0).turn():
        pass


async def test_a_slot_is_free_again_when_its_call_is_cancelled(tmp_path: Path) -> None:
    limits, other = Limits(tmp_path, 1, None), Limits(tmp_path, 1, None)
    inside = asyncio.Event()

    async def call() -> None:
        async with limits.turn():
            inside.set()
            await asyncio.sleep(60)

    calling = asyncio.create_task(call())
    await inside.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), other.turn():
            pass
    calling.cancel()
    await asyncio.wait({calling})
    async with asyncio.timeout(5), other.turn():
        pass


def test_a_folder_without_locks_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="cannot hold the file locks that max_concurrent and max_per_s need"):
        Limits(tmp_path / "file" / "folder", 1, None)
