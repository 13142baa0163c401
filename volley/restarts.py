"""Limits how often dead processes are replaced before their deaths are reported as the failure."""

import time
from collections import deque

HOUR = 3600.0


class Restarts:
    """At most ``most`` replacements within any ``seconds``: a long run survives rare deaths, a crash loop ends it."""

    def __init__(self, most: int, seconds: float = HOUR) -> None:
        self.most, self.seconds = most, seconds
        self._times: deque[float] = deque()

    def allow(self) -> bool:
        """Count one death; returns True if the dead process may be replaced."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > self.seconds:
            self._times.popleft()
        return len(self._times) <= self.most
