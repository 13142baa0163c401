"""A time limit for comparing an output, since the program controls its length and shape.

The comparison runs in a thread of the judge, which no signal can interrupt, so it calls `tick` at every step instead.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator

STEPS = 2048  # between two checks of the clock


class OutOfTime(Exception):
    """The block in `time_limit` used more processor time than allowed."""


class _Clock(threading.local):
    deadline = math.inf  # in processor seconds of this thread
    steps = 0


_clock = _Clock()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the processor time of a block that calls `tick`, which raises OutOfTime once the time is used up."""
    _clock.deadline = time.thread_time() + seconds
    try:
        yield
    finally:
        _clock.deadline = math.inf


def tick() -> None:
    """Count one step. Raises OutOfTime if the time is used up; does nothing outside `time_limit`."""
    _clock.steps += 1
    if _clock.steps >= STEPS:
        _clock.steps = 0
        if time.thread_time() > _clock.deadline:
            raise OutOfTime
