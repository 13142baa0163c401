"""Run a coroutine in the foreground: Ctrl-C and SIGTERM end it in order."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_foreground(main: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result.

    The first SIGINT or SIGTERM cancels it, so that every block it is in ends and no process is left; further ones
    are ignored while that happens, which is bounded.

    Raises:
        KeyboardInterrupt: it was stopped by a signal.
    """

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            if not stopped and task is not None:
                stopped = True
                sys.stderr.write("volley: stopping\n")
                task.cancel()

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
