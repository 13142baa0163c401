"""Starting roles together, and stopping in an orderly way."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from services.signals import StopSignal, run_in_foreground
from services.tasks import cancel_all, start_all
from tests.hangup import hangup_counts
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


async def test_all_start_together_and_all_are_stopped() -> None:
    stopped: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        roles = await asyncio.wait_for(start_all(stack, *(starts(stopped, name, 0.2) for name in "abc")), 0.5)
        assert [role.name for role in roles] == ["a", "b", "c"]
        assert not stopped
    assert sorted(stopped) == ["a", "b", "c"]


async def test_if_one_does_not_start_the_others_are_stopped() -> None:
    stopped: list[str] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            late = starts(stopped, "late", 60)
            await start_all(stack, starts(stopped, "a"), starts(stopped, "b", 0.05, HostError("no room")), late)

    with pytest.raises(HostError, match="no room"):
        await main()
    assert stopped == ["a"], "started roles are stopped, and a start under way is not awaited"


async def test_a_cancelled_start_stops_the_roles_that_had_started() -> None:
    stopped: list[str] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await start_all(stack, starts(stopped, "a"), starts(stopped, "late", 60))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(main(), 0.1)
    assert stopped == ["a"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_every_block_and_later_signals_are_ignored(number: signal.Signals) -> None:
    ended: list[str] = []

    async def main() -> None:
        try:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), number)  # is ignored
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append("clean")

    with hangup_counts(), pytest.raises(KeyboardInterrupt):
        run_in_foreground(main())
    assert ended == ["clean"]


def signals(*after: float) -> None:
    """Send SIGTERM to this process after each of these delays in seconds."""
    for seconds in after:
        asyncio.get_running_loop().call_later(seconds, os.kill, os.getpid(), signal.SIGTERM)


def test_a_grace_period_leaves_time_for_a_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    stop_signal, done = StopSignal(), []

    async def main() -> str:
        signals(0.02)
        with stop_signal.grace_period(20):
            await stop_signal.requested.wait()
            done.append("checkpoint")
        signals(0.02)  # too late: it changes nothing
        await asyncio.sleep(0.1)
        return "whole"

    assert run_in_foreground(main(), stop_signal) == "whole"
    assert done == ["checkpoint"]
    assert stop_signal.signalled
    message = "volley: stopping at a checkpoint, within 20 s; a second signal ends it at once\n"
    assert capfd.readouterr().err == message


@pytest.mark.parametrize(
    ("grace", "after"), [(20.0, (0.02, 0.05)), (0.05, (0.02,))], ids=["second signal", "time is up"]
)
def test_a_second_signal_or_the_end_of_the_grace_period_cancels_the_work(
    grace: float, after: tuple[float, ...]
) -> None:
    stop_signal, ended = StopSignal(), []

    async def main() -> None:
        signals(*after)
        try:
            with stop_signal.grace_period(grace):
                await asyncio.sleep(60)
        finally:
            signals(0.0)
            await asyncio.sleep(0.1)
            ended.append("clean")

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_foreground(main(), stop_signal)
    assert ended == ["clean"]
    assert time.monotonic() - begun < 10


def test_work_in_a_grace_period_can_be_asked_to_stop() -> None:
    stop_signal = StopSignal()
    assert not stop_signal.request()
    with stop_signal.grace_period(0):
        assert not stop_signal.request(), "a grace period of 0 s means that there is none"
    with stop_signal.grace_period(1):
        assert stop_signal.request()
    assert stop_signal.requested.is_set()
    assert not stop_signal.signalled


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def main() -> str:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
            return "whole"

        assert run_in_foreground(main()) == "whole"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_a_signal_the_result_is_returned() -> None:
    async def main() -> int:
        return 7

    assert run_in_foreground(main()) == 7


async def test_a_task_that_lost_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's `asyncio.wait_for` loses a cancellation that arrives just as the awaited task ends."""
    monkeypatch.setattr("services.tasks.CANCEL_AGAIN_SECONDS", 0.01)
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
