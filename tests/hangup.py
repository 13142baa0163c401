"""Tests that `nohup` started ignore SIGHUP, and so would the processes that they start."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hangup_counts() -> Iterator[None]:
    """Within the block, SIGHUP does what it does to a process that a terminal started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
