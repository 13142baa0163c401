"""The watchdog's records: who waits for what, and since when."""

import contextlib
import time
from collections.abc import Callable, Iterator

NOTABLE_SECONDS = 5.0  # shorter waits are normal in every step


class Waits:
    """The waits under way, on one event loop."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[Callable[[], str], float]] = {}
        self._reported: set[tuple[str, float]] = set()

    @contextlib.contextmanager
    def record(self, waiter: str, awaited: Callable[[], str]) -> Iterator[None]:
        """Record that ``waiter`` waits during the block. ``awaited`` describes what for, each time it is called."""
        self._waits[waiter] = (awaited, time.monotonic())
        try:
            yield
        finally:
            self._waits.pop(waiter, None)

    def __contains__(self, waiter: str) -> bool:
        return waiter in self._waits

    def overdue(self, seconds: float) -> list[str]:
        """A sentence for each wait that has lasted for ``seconds`` and was not reported by an earlier call."""
        now = time.monotonic()
        late = {(who, since) for who, (_, since) in self._waits.items() if now - since >= seconds}
        new, self._reported = late - self._reported, late
        return [self._sentence(who, now) for who, _ in sorted(new)]

    def sentences(self, longer_than: float = NOTABLE_SECONDS) -> tuple[str, ...]:
        """A sentence for each wait that has lasted for ``longer_than`` seconds."""
        now = time.monotonic()
        return tuple(self._sentence(who, now) for who, (_, since) in self._waits.items() if now - since >= longer_than)

    def _sentence(self, waiter: str, now: float) -> str:
        awaited, since = self._waits[waiter]
        return f"{waiter} has waited {now - since:.0f} s for {awaited()}"
