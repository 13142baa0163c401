"""Run a coroutine in the foreground and end it in an orderly way on Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class StopSignal:
    """What SIGINT and SIGTERM do: cancel the work, or during a grace period first ask it to stop.

    Attributes:
        requested: set when the work should stop at its next checkpoint, by the first signal of a grace period or by
            `request`.
        signalled: whether a signal set it.
    """

    def __init__(self) -> None:
        self.requested, self.signalled = asyncio.Event(), False
        self._seconds = 0.0  # length of the grace period in effect
        self._too_late = False  # the work is cancelled or past its last checkpoint: signals change nothing
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def grace_period(self, seconds: float) -> Iterator[None]:
        """During the block, the first signal only sets `requested`.

        The work is cancelled ``seconds`` later, or at a second signal. With 0 the first signal cancels it.
        """
        self._seconds = seconds
        try:
            yield
        finally:
            self._seconds, self._too_late = 0.0, self._too_late or self.requested.is_set()
            if self._timer is not None:
                self._timer.cancel()

    def request(self) -> bool:
        """Set `requested` if a grace period is in effect; returns whether it is set."""
        if self._seconds:
            self.requested.set()
        return self.requested.is_set()

    def handle(self, cancel: Callable[[], object]) -> str:
        """Handle a signal; return the message to print, or "" if the signal changes nothing.

        Args:
            cancel: cancels the work.
        """
        if self._too_late:
            return ""
        if self._seconds and not self.signalled:
            self.signalled = True
            self.requested.set()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._cancel, cancel)
            return f"stopping at a checkpoint, within {self._seconds:g} s; a second signal ends it at once"
        self._cancel(cancel)
        return "stopping"

    def _cancel(self, cancel: Callable[[], object]) -> None:
        self._too_late = True
        cancel()


def run_in_foreground(main: Coroutine[Any, Any, T], stop_signal: StopSignal | None = None) -> T:
    """Run ``main`` on an event loop of its own and return its result.

    SIGINT and SIGTERM do what ``stop_signal`` says, which ends in cancelling the coroutine, so that all of its blocks
    are left and no process stays behind. Signals are ignored during that clean-up, which is bounded.

    Raises:
        KeyboardInterrupt: a signal cancelled the coroutine.
    """
    stop_signal = stop_signal or StopSignal()

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        signalled = False

        def on_signal() -> None:
            nonlocal signalled
            signalled = True
            if task is not None and (message := stop_signal.handle(task.cancel)):
                sys.stderr.write(f"volley: {message}\n")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            return await main
        except asyncio.CancelledError:
            if signalled:
                raise KeyboardInterrupt from None
            raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    return asyncio.run(guarded())
