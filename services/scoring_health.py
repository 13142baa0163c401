"""When scoring itself fails, samples leave their groups; when too many do, the run waits for the scorer to be mended.

healthy ──share of infra errors over the last groups above the bound──> failing
   ^                                                                      │ one probe group at a time,
   └────────────── a probe group scored within the bound ─────────────────┘ 1, 2, 4 ... seconds apart
"""

import time
from collections import deque

from volley.errors import NoSignal
from volley.job import InfraErrorsSpec
from volley.records import Scores

FIRST_PROBE_SECONDS = 1.0


class ScoringHealth:
    """Judges by the last groups whether it is worth generating more. Owned by one event loop."""

    def __init__(self, spec: InfraErrorsSpec) -> None:
        self._spec = spec
        self._recent: deque[tuple[int, int]] = deque(maxlen=spec.window)
        self._since: float | None = None
        self._probe_at = 0.0
        self._pause = FIRST_PROBE_SECONDS
        self.problem = ""

    @property
    def failing(self) -> bool:
        return self._since is not None

    def probe_due(self) -> bool:
        """May one group be tried while scoring fails?"""
        return time.monotonic() >= self._probe_at

    def probing(self) -> None:
        """A group is tried: the next one only after twice the pause."""
        self._probe_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, self._spec.probe_every_s)

    def note(self, scores: Scores) -> None:
        """One group was scored, or was not.

        Raises:
            NoSignal: scoring has failed for ``give_up_s`` on end.
        """
        lost, n = int((~scores.valid_n).sum()), len(scores.valid_n)
        if self.failing:
            self._note_probe(lost / n, scores)
            return
        self._recent.append((lost, n))
        share = sum(lost for lost, _ in self._recent) / sum(n for _, n in self._recent)
        if len(self._recent) == self._spec.window and share > self._spec.max_share:
            self._since, self._pause, self._probe_at = time.monotonic(), FIRST_PROBE_SECONDS, 0.0
            self.problem = (
                f"{share:.0%} of the samples of the last {self._spec.window} groups could not be scored, "
                f"the last because: {_reason(scores)}"
            )

    def _note_probe(self, share: float, scores: Scores) -> None:
        if share <= self._spec.max_share:
            self._since, self.problem = None, ""
            self._recent.clear()
        elif self._since is not None and (failing := time.monotonic() - self._since) > self._spec.give_up_s:
            raise NoSignal(
                f"samples could not be scored for {failing:.0f} s (infra_errors.give_up_s), the last because: "
                f"{_reason(scores)}. Mend the scorer, see the reward workers' logs, and resume the run"
            )


def _reason(scores: Scores) -> str:
    """Why the group's first unscored sample was not scored."""
    return next((verdict.detail for verdict in scores.verdicts if verdict.reward is None), "") or "unknown"
