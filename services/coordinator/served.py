"""Checks that actors serve what the learner trained: once early, then before every checkpoint."""

from collections.abc import Awaitable, Callable

from services.coordinator.watchdog import Waits


class ServedChecks:
    """Makes the checks, and keeps the last one's result for the next step to report.

    Args:
        check: see `Hooks.check_served`.

    Attributes:
        made: whether any actor was checked so far.
    """

    def __init__(self, check: Callable[[], Awaitable[float | None]], waits: Waits) -> None:
        self._check, self._waits = check, waits
        self._mismatch: float | None = None  # that no step has reported yet
        self.made = False

    async def check(self, version: int) -> None:
        """Check ``version``, which learner and actors hold; raises `ServedWeightsDiffer`."""
        with self._waits.record("learner", lambda: f"the actors' log-probs under version {version}"):
            self._mismatch = await self._check()
        self.made |= self._mismatch is not None

    def take_metrics(self) -> dict[str, float]:
        """What the last check found, for the metrics of one step."""
        mismatch, self._mismatch = self._mismatch, None
        return {} if mismatch is None else {"served_mismatch_max": mismatch}
