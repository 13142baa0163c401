"""Starting roles side by side, and stopping in order."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from services.foreground import Ending, run_in_foreground
from services.start import cancel_all, start_all
from volley.errors import HostError


class Role:
    def __init__(self, stopped: list[str], name: str) -> None:
        self.stopped, self.name = stopped, name

    async def stop(self) -> None:
        self.stopped.append(self.name)


async def starts(stopped: list[str], name: str, seconds: float = 0.0, error: Exception | None = None) -> Role:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return Role(stopped, name)


async def test_all_start_together_and_all_stop() -> None:
    stopped: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        roles = await asyncio.wait_for(start_all(stack, *(starts(stopped, name, 0.2) for name in "abc")), 0.5)
        assert [role.name for role in roles] == ["a", "b", "c"]
        assert not stopped
    assert sorted(stopped) == ["a", "b", "c"]


async def test_when_one_does_not_start_the_others_are_stopped() -> None:
    stopped: list[str] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            late = starts(stopped, "late", 60)
            await start_all(stack, starts(stopped, "a"), starts(stopped, "b", 0.05, HostError("no room")), late)

    with pytest.raises(HostError, match="no room"):
        await main()
    assert stopped == ["a"], "what came up is stopped, what was still coming is not awaited"


async def test_a_cancelled_start_stops_what_came_up() -> None:
    stopped: list[str] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await start_all(stack, starts(stopped, "a"), starts(stopped, "late", 60))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(main(), 0.1)
    assert stopped == ["a"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_block_in_order(number: signal.Signals) -> None:
    ended: list[str] = []

    async def main() -> None:
        try:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), number)  # an impatient second one
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append("clean")

    with pytest.raises(KeyboardInterrupt):
        run_in_foreground(main())
    assert ended == ["clean"]


def signals(*after: float) -> None:
    """SIGTERM to this process, so many seconds from now."""
    for seconds in after:
        asyncio.get_running_loop().call_later(seconds, os.kill, os.getpid(), signal.SIGTERM)


def test_a_block_that_holds_the_end_is_left_time_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    ending, done = Ending(), []

    async def main() -> str:
        signals(0.02)
        with ending.held(20):
            await ending.wanted.wait()
            done.append("checkpoint")
        signals(0.02)  # when what is left can not be hurried
        await asyncio.sleep(0.1)
        return "whole"

    assert run_in_foreground(main(), ending) == "whole"
    assert done == ["checkpoint"]
    assert ending.signalled
    said = "volley: stopping at a checkpoint, within 20 s; a second signal ends it at once\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(("grace", "after"), [(20.0, (0.02, 0.05)), (0.05, (0.02,))], ids=["hurried", "late"])
def test_a_second_signal_or_the_end_of_its_time_cancels_it(grace: float, after: tuple[float, ...]) -> None:
    ending, ended = Ending(), []

    async def main() -> None:
        signals(*after)
        try:
            with ending.held(grace):
                await asyncio.sleep(60)
        finally:
            signals(0.0)
            await asyncio.sleep(0.1)
            ended.append("clean")

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_foreground(main(), ending)
    assert ended == ["clean"]
    assert time.monotonic() - begun < 10


def test_a_block_that_holds_the_end_can_be_asked_to_bring_it_about() -> None:
    ending = Ending()
    assert not ending.ask()
    with ending.held(0):
        assert not ending.ask(), "it wants no time"
    with ending.held(1):
        assert ending.ask()
    assert ending.wanted.is_set()
    assert not ending.signalled


def test_without_a_signal_the_result_comes_back() -> None:
    async def main() -> int:
        return 7

    assert run_in_foreground(main()) == 7


async def test_a_loop_ends_although_a_cancellation_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.11's `asyncio.wait_for` loses one that comes when what it waits for has just ended."""
    monkeypatch.setattr("services.start.CANCEL_AGAIN_SECONDS", 0.01)
    lost = 0

    async def loop() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost > 2:
                    raise

    async def fails() -> None:
        raise HostError("gone")

    tasks = [asyncio.create_task(loop()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel_all(tasks), 5)
    assert lost == 3
    assert tasks[0].cancelled()
    assert isinstance(tasks[1].exception(), HostError)
