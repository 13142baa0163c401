"""The parts of the learner's pool that need no ranks."""

import asyncio
import threading

import pytest

from learner.pool import _to_its_end


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_work_in_a_thread_ends_before_its_cancellation_is_raised(times: int) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(10)
        ended.set()

    waiting = asyncio.create_task(_to_its_end(asyncio.to_thread(work)))
    for _ in range(times):
        await asyncio.sleep(0.01)
        waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    may_end.set()
    if times:
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        await waiting
    assert ended.is_set()


async def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise OSError("read-only")

    with pytest.raises(OSError, match="read-only"):
        await _to_its_end(asyncio.to_thread(work))
