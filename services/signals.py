"""Run a coroutine in the foreground and end it in order on Ctrl-C, SIGTERM, or when its terminal closes."""

import asyncio
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = 10.0  # with threads that the user's code left running


class StopSignal:
    """What SIGINT, SIGTERM and SIGHUP do: cancel the work, or during a grace period first ask it to stop.

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

    SIGINT, SIGTERM and SIGHUP, unless `nohup` has it ignored, do what ``stop_signal`` says, which ends in cancelling
    the coroutine, so that all of its blocks are left and no process stays behind. Signals are ignored during that
    clean-up, which is bounded.

    Raises:
        KeyboardInterrupt: a signal cancelled the coroutine.
    """
    stop_signal = stop_signal or StopSignal()
    numbers = [signal.SIGINT, *_endings()]

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        signalled = False

        def on_signal(number: signal.Signals) -> None:
            nonlocal signalled
            signalled = True
            if number is signal.SIGHUP:
                _leave_terminal()
            if task is not None and (message := stop_signal.handle(task.cancel)):
                sys.stderr.write(f"volley: {message}\n")

        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await main
        except asyncio.CancelledError:
            if signalled:
                raise KeyboardInterrupt from None
            raise
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    return asyncio.run(guarded())


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, unless `nohup` has it ignored, interrupt the block as Ctrl-C does, so that it is left.

    For what precedes `run_in_foreground`. Only the main thread can handle signals; elsewhere nothing changes.
    """

    def interrupt(number: int, _frame: object) -> NoReturn:
        if number == signal.SIGHUP:
            _leave_terminal()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.signal(number, interrupt) for number in _endings()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def leave_soon(code: int) -> None:
    """End the process, whose work is done, with ``code`` if threads keep it alive 10 s from now.

    Python would wait for threads that a user's code left running. Handlers of `atexit` are then skipped.
    """
    threading.Thread(target=_end_if_left, args=(code,), name="leave", daemon=True).start()


def _end_if_left(code: int) -> None:
    time.sleep(PATIENCE_SECONDS)
    left = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if not left:
        return
    what = f"the thread {left[0]}" if len(left) == 1 else f"{len(left)} threads ({', '.join(left)})"
    try:
        sys.stdout.flush()
        sys.stderr.write(f"volley: note: did not wait for {what}, which the job's code left running\n")
        sys.stderr.flush()
    finally:  # even if nobody reads any more
        os._exit(code)


def _endings() -> list[signal.Signals]:
    """The signals besides Ctrl-C's that end a command."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


def _leave_terminal() -> None:
    """Discard what this process still prints to its terminal: once that is closed, printing raises."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        if _is_terminal(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _is_terminal(descriptor: int) -> bool:
    """Whether it is a terminal, open or closed: `os.isatty` is false for a closed one."""
    try:
        os.ttyname(descriptor)
    except OSError as error:
        return error.errno == errno.EIO
    return True
