"""Run a coroutine in the foreground: Ctrl-C and SIGTERM end it in order."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Ending:
    """What a signal does: it cancels what runs, or leaves time for an end in order where a block asks for that.

    Attributes:
        wanted: set by the first signal that leaves time, or by `ask`.
        signalled: by a signal.
    """

    def __init__(self) -> None:
        self.wanted, self.signalled = asyncio.Event(), False
        self._seconds = 0.0
        self._over = False  # what is left to do can not be hurried
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """For the length of the block the first signal only sets `wanted`; it has ``seconds`` from then on, or until a
        second signal. 0: there is nothing to wait for."""
        self._seconds = seconds
        try:
            yield
        finally:
            self._seconds, self._over = 0.0, self._over or self.wanted.is_set()
            if self._timer is not None:
                self._timer.cancel()

    def ask(self) -> bool:
        """Set `wanted` where a block holds; False where none does."""
        if self._seconds:
            self.wanted.set()
        return self.wanted.is_set()

    def signal(self, cancel: Callable[[], object]) -> str:
        """One has come; returns what is to be said of it, or nothing where it changes nothing."""
        if self._over:
            return ""
        if self._seconds and not self.signalled:
            self.signalled = True
            self.wanted.set()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._cancel, cancel)
            return f"stopping at a checkpoint, within {self._seconds:g} s; a second signal ends it at once"
        self._cancel(cancel)
        return "stopping"

    def _cancel(self, cancel: Callable[[], object]) -> None:
        self._over = True
        cancel()


def run_in_foreground(main: Coroutine[Any, Any, T], ending: Ending | None = None) -> T:
    """The coroutine's result.

    SIGINT and SIGTERM do what ``ending`` says. At last the coroutine is cancelled, so that every block it is in ends
    and no process is left; signals are ignored while that happens, which is bounded.

    Raises:
        KeyboardInterrupt: it was cancelled by a signal.
    """
    ending = ending or Ending()

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            if task is not None and (words := ending.signal(task.cancel)):
                sys.stderr.write(f"volley: {words}\n")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            return await main
        except asyncio.CancelledError:
            if stopped:
                raise KeyboardInterrupt from None
            raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    return asyncio.run(guarded())
