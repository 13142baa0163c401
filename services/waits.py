"""The watchdog's book: who waits, for whom, since when."""

import contextlib
import time
from collections.abc import Callable, Iterator

SPEAKS_AFTER = 5.0  # seconds; shorter waits are the pulse of a run


class Waits:
    """Waits under way. Owned by one event loop."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[Callable[[], str], float]] = {}
        self._told: set[tuple[str, float]] = set()

    @contextlib.contextmanager
    def on(self, waiter: str, awaited: Callable[[], str]) -> Iterator[None]:
        """For the length of the block ``waiter`` waits for what ``awaited()`` names at the time it is asked."""
        self._waits[waiter] = (awaited, time.monotonic())
        try:
            yield
        finally:
            self._waits.pop(waiter, None)

    def __contains__(self, waiter: str) -> bool:
        return waiter in self._waits

    def overdue(self, seconds: float) -> list[str]:
        """Sentences for the waits that have lasted so long; each wait once."""
        now = time.monotonic()
        late = {(who, since) for who, (_, since) in self._waits.items() if now - since >= seconds}
        new, self._told = late - self._told, late
        return [f"{who} has waited {now - since:.0f} s for {self._waits[who][0]()}" for who, since in sorted(new)]

    def words(self, longer_than: float = SPEAKS_AFTER) -> tuple[str, ...]:
        """A sentence for each wait that has lasted ``longer_than`` seconds."""
        now = time.monotonic()
        return tuple(
            f"{waiter} has waited {now - since:.0f} s for {awaited()}"
            for waiter, (awaited, since) in self._waits.items()
            if now - since >= longer_than
        )
