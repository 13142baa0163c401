"""For how long drivers have reported nothing, by the supervisor's own clock.

A report is a new observed state, whatever time is written in it: clocks of different machines are never compared. Time
in which nobody watched hardly counts, as while the supervisor was suspended or Redis was away.
"""

from collections.abc import Collection

MOST_SECONDS = 10.0  # that count of the time between two passes, however long it was

Report = tuple[int, float]  # number of the driver, and `updated` of the observed state


class Silence:
    """The last report of each run, and when it was first seen."""

    def __init__(self) -> None:
        self._before: float | None = None  # when the last pass began
        self._watched = 0.0  # seconds in all
        self._seen: dict[str, tuple[Report, float]] = {}

    def begin_pass(self, now: float, run_ids: Collection[str]) -> None:
        """Begin a pass, once Redis has answered.

        Args:
            now: seconds, of a monotonic clock.
            run_ids: all runs; others are forgotten.
        """
        if self._before is not None:
            self._watched += min(now - self._before, MOST_SECONDS)
        self._before = now
        self._seen = {run_id: seen for run_id, seen in self._seen.items() if run_id in run_ids}

    def of(self, run_id: str, report: Report) -> float:
        """Return for how many seconds this has been the run's last report, as of the beginning of the pass."""
        if run_id not in self._seen or self._seen[run_id][0] != report:
            self._seen[run_id] = (report, self._watched)
        return self._watched - self._seen[run_id][1]
