"""Samples that cannot be scored leave their groups. When there are too many, the run pauses until scoring works again.

healthy ──the share of unscored samples in the last groups exceeds the bound──> failing
   ^                                                                              │ one probe group at a time,
   └───────────────── a probe group was scored within the bound ──────────────────┘ 1, 2, 4 ... seconds apart
"""

import time
from collections import deque

from volley.errors import NoSignal
from volley.job import InfraErrorsSpec
from volley.records import Scores

FIRST_PROBE_SECONDS = 1.0


class ScoringHealth:
    """Decides from the scores of the last groups whether scoring works.

    Attributes:
        problem: why scoring counts as failing, or "".
    """

    def __init__(self, spec: InfraErrorsSpec) -> None:
        self._spec = spec
        self._recent: deque[tuple[int, int]] = deque(maxlen=spec.window)  # unscored samples and n of each group
        self._failing_since: float | None = None
        self._next_probe = 0.0
        self._pause = FIRST_PROBE_SECONDS
        self.problem = ""

    @property
    def failing(self) -> bool:
        return self._failing_since is not None

    def probe_due(self) -> bool:
        """Whether one more group may be tried while scoring fails."""
        return time.monotonic() >= self._next_probe

    def start_probe(self) -> None:
        """Note that a group is being tried. The pause before the next probe doubles."""
        self._next_probe = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, self._spec.probe_every_s)

    def note(self, scores: Scores) -> None:
        """Take the scores of one more group into account.

        Raises:
            NoSignal: scoring has failed for longer than ``give_up_s``.
        """
        unscored, n = int((~scores.valid_n).sum()), len(scores.valid_n)
        if self.failing:
            self._note_probe(unscored / n, scores)
            return
        self._recent.append((unscored, n))
        share = sum(unscored for unscored, _ in self._recent) / sum(n for _, n in self._recent)
        if len(self._recent) == self._spec.window and share > self._spec.max_share:
            self._failing_since, self._pause, self._next_probe = time.monotonic(), FIRST_PROBE_SECONDS, 0.0
            self.problem = (
                f"{share:.0%} of the samples of the last {self._spec.window} groups could not be scored, "
                f"the last because: {_reason(scores)}"
            )

    def _note_probe(self, share: float, scores: Scores) -> None:
        if share <= self._spec.max_share:
            self._failing_since, self.problem = None, ""
            self._recent.clear()
        elif self._failing_since is not None and (failed := time.monotonic() - self._failing_since) > (
            self._spec.give_up_s
        ):
            raise NoSignal(
                f"samples could not be scored for {failed:.0f} s (infra_errors.give_up_s), the last because: "
                f"{_reason(scores)}. Look at the reward workers' logs, repair the scorer, and resume the run"
            )


def _reason(scores: Scores) -> str:
    """Why the group's first unscored sample was not scored."""
    return next((verdict.detail for verdict in scores.verdicts if verdict.reward is None), "") or "unknown"
