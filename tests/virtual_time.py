"""Runs coroutines on a clock that jumps to the next timer, so that minutes of waiting take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

_T = TypeVar("_T")


class _Clock(selectors.DefaultSelector):
    """A selector that lets time pass instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("everything waits, and nothing will happen any more")
        self.now += 0.0 if events else max(0.0, timeout or 0.0)
        return events


def run_in_virtual_time(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` on a loop of its own. `time.monotonic` and `time.perf_counter` tell its time too, from 0."""
    clock = _Clock()

    def tell() -> float:
        return clock.now

    with (
        mock.patch("time.monotonic", tell),
        mock.patch("time.perf_counter", tell),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner,
    ):
        return runner.run(main)
