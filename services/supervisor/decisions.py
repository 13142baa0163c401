"""What to do about a run, given its state, its drivers and what users want.

| state of the run                | if no driver is alive                                    | if one is alive      |
|---------------------------------|----------------------------------------------------------|----------------------|
| queued                          | submit, once it is admitted                              | kill if mute         |
| starting, running, paused, ...  | submit again, at growing intervals; end as failed after  | kill if mute         |
|                                 | `BARREN_LIVES` drivers in a row without a step, not      |                      |
|                                 | counting drivers that only waited for resources or       |                      |
|                                 | ended because of a signal                                |                      |
| any of these, a stop is desired | end as stopped                                           | kill if mute         |
| stopped, no stop is desired     | submit, once it is admitted: its user resumed it         | kill if it lingers   |
| failed                          | submit if a user changed the run since; also if the      | kill if it lingers   |
|                                 | driver was killed right after it reported the failure,   |                      |
|                                 | because whatever killed it also kills its workers        |                      |
| done                            | nothing                                                  | kill if it lingers   |
"""

from dataclasses import dataclass
from typing import Literal

from services.supervisor.ray_jobs import JobStatus
from volley.base import Spec
from volley.state import ENDED, Desired, Observed, RunRecord

BARREN_LIVES = 5  # drivers in a row that end without a step before the run fails
LONGEST_DELAY = 60.0  # between two drivers of one run
MUTE_SECONDS = 60.0  # a live driver that reports nothing for this long hangs
START_SECONDS = 600.0  # the same for a driver that has never reported


class DriverHistory(Spec):
    """The supervisor's record of a run's drivers. Times are in seconds since 1970.

    Attributes:
        count: drivers submitted so far.
        submitted: when the last one was submitted.
        revision: revision of the desired state at that time.
        step: most steps that were done whenever a driver was submitted.
        barren: drivers in a row that were submitted although the one before had done no step.
        killed: the supervisor killed the last one because it was mute.
        seen: the ``updated`` of the observed state when the last one was submitted: another value is a newer report.
    """

    count: int = 0
    submitted: float = 0.0
    revision: int = 0
    step: int = 0
    barren: int = 0
    killed: bool = False
    seen: float = 0.0

    def after_submit(self, desired: Desired, observed: Observed, now: float) -> "DriverHistory":
        """Return the history with one more driver."""
        return DriverHistory(
            count=self.count + 1,
            submitted=now,
            revision=desired.revision,
            step=max(self.step, observed.step),
            barren=self.judged(desired, observed).barren,
            seen=observed.updated,
        )

    def judged(self, desired: Desired, observed: Observed) -> "DriverHistory":
        """Return the history with what the last driver did counted, for when the observed state no longer shows it.

        If a user resumed the run, the count of failures starts anew.
        """
        fresh = self.count == 0 or observed.step > self.step or self.resumed_by_user(desired, observed)
        barren = self.barren if self.blameless(observed) else self.barren + 1
        return self.model_copy(update={"barren": 0 if fresh else barren, "killed": False})

    def reported(self, observed: Observed) -> bool:
        """Return whether anything was reported since the last driver was submitted. No clocks are compared."""
        return observed.updated != self.seen

    def blameless(self, observed: Observed) -> bool:
        """Return whether the last driver could not do a step because it waited for resources or was asked to end."""
        return self.reported(observed) and not self.killed and observed.state in ("pending", "stopped", "queued")

    def resumed_by_user(self, desired: Desired, observed: Observed) -> bool:
        """Return whether the run has ended and its desired state was changed since."""
        return observed.state in ENDED and desired.revision > max(self.revision, observed.revision)


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing. ``settled`` means that nothing will be needed until somebody changes the desired state."""

    settled: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a driver."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the driver; a later pass starts another."""

    why: str


@dataclass(frozen=True, slots=True)
class End:
    """Record that the run has ended, because no driver is left to do so."""

    state: Literal["stopped", "failed"]
    problem: str = ""


Action = Wait | Submit | Kill | End


@dataclass(frozen=True, slots=True)
class Look:
    """What a pass found out about a run."""

    record: RunRecord
    desired: Desired
    observed: Observed
    history: DriverHistory
    job: JobStatus
    action: Action

    @property
    def run_id(self) -> str:
        return self.record.id

    @property
    def workers(self) -> Observed:
        """The numbers of workers to reserve for: a driver to come starts with the job's."""
        return self.observed if self.job == "alive" else Observed()


def decide(
    desired: Desired,
    observed: Observed,
    job: JobStatus,
    history: DriverHistory,
    now: float,
    *,
    silent: float = 0.0,
) -> Action:
    """Decide what to do about one run.

    Args:
        job: status of the newest driver; Ray forgets drivers when its head is replaced.
        now: seconds since 1970.
        silent: seconds for which the driver was watched without a report; see `services.supervisor.silence`.
    """
    if job == "alive":
        return _about_driver(observed, history, silent)
    if observed.state == "done" or (observed.state in ENDED and desired.stopped):
        return Wait(settled=True)
    if desired.stopped:
        return End("stopped")
    if history.resumed_by_user(desired, observed):
        return Submit()
    if observed.state == "failed" and (job != "killed" or history.barren >= BARREN_LIVES):
        return Wait(settled=True)
    if job == "none" and observed.state != "queued" and not observed.lost(now) and observed.state not in ENDED:
        return Wait()  # Ray does not know the driver, but it reported a moment ago
    barren = observed.step <= history.step and not history.blameless(observed)
    if barren and history.barren >= BARREN_LIVES - 1:
        return End("failed", f"{BARREN_LIVES} drivers in a row ended without completing a step")
    return Submit() if now >= history.submitted + delay(history) else Wait()


def delay(history: DriverHistory) -> float:
    """Return the seconds between the start of the last driver and the next."""
    return min(LONGEST_DELAY, 2.0 ** (history.barren + 1)) if history.barren else 0.0


def _about_driver(observed: Observed, history: DriverHistory, silent: float) -> Action:
    starting = observed.state == "queued" or not history.reported(observed)
    bound = START_SECONDS if starting else MUTE_SECONDS
    return Kill(f"its driver has reported nothing for {silent:.0f} s") if silent > bound else Wait()
