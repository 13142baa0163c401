"""Samples that cannot be scored leave their groups. When there are too many, the run pauses until scoring works again.

healthy ──the share of unscored samples in the last groups exceeds the bound──> failing
   ^                                                                              │ one probe group at a time,
   └───────────────── a probe group was scored within the bound ──────────────────┘ 1, 2, 4 ... seconds apart

A user's function that has scored nothing, and raised the same programming error each time, ends the run instead:
waiting does not mend it. A failure that a server or the host may have caused is never taken for such an error.
"""

import time
from collections import deque

from volley.errors import JobError, NoSignal
from volley.job import InfraErrorsSpec
from volley.records import Scores

FIRST_PROBE_SECONDS = 1.0
MAX_REASONS = 3
ADVICE = "`volley logs RUN reward-0` shows the log of a reward worker, with the traceback of a function that raised"
PROGRAM_ADVICE = (
    "`volley logs RUN environment-0` shows the log of an environment worker, with the traceback of a program or tool "
    "that raised"
)
EITHER_ADVICE = f"{PROGRAM_ADVICE}; `volley logs RUN reward-0` shows that of a scorer's function"


class ScoringHealth:
    """Decides from the scores of the last groups whether scoring works.

    Args:
        program: whether the job has a program, whose failures leave samples without a score too.

    Attributes:
        problem: why scoring counts as failing, or "".
    """

    def __init__(self, spec: InfraErrorsSpec, *, program: bool = False) -> None:
        self._spec, self._program = spec, program
        self._recent: deque[tuple[int, int]] = deque(maxlen=spec.window)  # unscored samples and n of each group
        self._failing_since: float | None = None
        self._reasons: set[str] = set()
        self._scored = False  # whether any sample was
        self._mistakes: set[str] = set()  # of the samples that were not
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

    def note(self, scores: Scores) -> list[tuple[str, str]]:
        """Take the scores of one more group into account.

        Returns:
            What there is to report, as (kind of event, problem): that admission pauses, that it goes on, and why a
            sample could not be scored, for the first `MAX_REASONS` different reasons.

        Raises:
            NoSignal: scoring has failed for longer than ``give_up_s``.
            JobError: the user's function is broken.
        """
        news = self._new_reasons(scores)
        failing = self.failing
        unscored, n = int((~scores.valid_n).sum()), len(scores.valid_n)
        self._scored = self._scored or unscored < n
        self._mistakes |= mistakes_of(scores)
        if failing:
            self._note_probe(unscored / n, scores)
        else:
            self._note_group(unscored, n, scores)
        if self.failing != failing:
            news.append(("paused" if self.failing else "unpaused", self.problem))
        return news

    def _new_reasons(self, scores: Scores) -> list[tuple[str, str]]:
        reason = _reason(scores)
        if not reason or reason in self._reasons or len(self._reasons) == MAX_REASONS:
            return []
        self._reasons.add(reason)
        return [("trouble", f"a sample could not be scored and leaves its group: {reason}. {self._advice(scores)}")]

    def _note_group(self, unscored: int, n: int, scores: Scores) -> None:
        self._recent.append((unscored, n))
        share = sum(unscored for unscored, _ in self._recent) / sum(n for _, n in self._recent)
        if len(self._recent) == self._spec.window and share > self._spec.max_share:
            self._check_function(scores)
            self._failing_since, self._pause, self._next_probe = time.monotonic(), FIRST_PROBE_SECONDS, 0.0
            self.problem = (
                f"{share:.0%} of the samples of the last {self._spec.window} groups could not be scored, "
                f"the last because: {_reason(scores)}. {self._advice(scores)}. The run tries again, for "
                f"{self._spec.give_up_s:g} s; a mistake in the code does not go away: stop the run, mend it and resume"
            )

    def _check_function(self, scores: Scores) -> None:
        if not self._scored and is_one_mistake(self._mistakes):
            raise broken_function(f"the first {self._spec.window} groups", _reason(scores))

    def _note_probe(self, share: float, scores: Scores) -> None:
        if share <= self._spec.max_share:
            self._failing_since, self.problem = None, ""
            self._recent.clear()
        elif self._failing_since is not None and (failed := time.monotonic() - self._failing_since) > (
            self._spec.give_up_s
        ):
            raise NoSignal(
                f"samples could not be scored for {failed:.0f} s (infra_errors.give_up_s), the last because: "
                f"{_reason(scores)}. {self._advice(scores)}. Repair the {'program or ' if self._program else ''}scorer "
                "and resume the run"
            )

    def _advice(self, scores: Scores) -> str:
        """Where the log is. A group whose samples never came to a scorer has no reward worker."""
        if not self._program:
            return ADVICE
        return EITHER_ADVICE if scores.worker else PROGRAM_ADVICE


def mistakes_of(scores: Scores) -> set[str]:
    """The programming errors for which samples were not scored; "" stands for every other failure."""
    return {verdict.mistake for verdict in scores.verdicts if verdict.reward is None}


def is_one_mistake(mistakes: set[str]) -> bool:
    """Whether all failures are one and the same programming error."""
    return len(mistakes) == 1 and "" not in mistakes


def broken_function(where: str, reason: str) -> JobError:
    """The error for a function that scored no sample of ``where``; ``reason`` is that of one failure."""
    return JobError(
        f"the scorer's function is broken: it scored no sample of {where}, and each failed with the same error, such "
        f"as: {reason}. {ADVICE}. Mend the function, and try it with `volley check JOB.yaml --answer TEXT`"
    )


def _reason(scores: Scores) -> str:
    """Why the group's first unscored sample was not scored; "" if all were."""
    unscored = next((verdict for verdict in scores.verdicts if verdict.reward is None), None)
    return "" if unscored is None else unscored.detail or "unknown"
