"""How often something that died may be replaced before its dying is the fault to report."""

import time
from collections import deque

HOUR = 3600.0


class Restarts:
    """At most ``most`` replacements within any ``seconds``: a long run outlives rare deaths, a crash loop ends.

    Args:
        most: 0 allows none.
    """

    def __init__(self, most: int, seconds: float = HOUR) -> None:
        self.most, self.seconds = most, seconds
        self._times: deque[float] = deque()

    def allow(self) -> bool:
        """Count one death; may what died be replaced?"""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > self.seconds:
            self._times.popleft()
        return len(self._times) <= self.most
