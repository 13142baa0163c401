"""Every error Volley raises on purpose.

VolleyError
├── JobError (ValueError)              the job, or a file it names, can not be used as written
│   └── DataError                      a dataset row is malformed; names file and line
├── HostError (RuntimeError)           this machine lacks something: a port, memory, a package, a server
│   └── DiskFull                       no room for a file; what was there before is untouched
├── WorkerDied (RuntimeError)          an actor, a reward worker or a learner rank ended; carries its last log lines
├── DeadlineExceeded (TimeoutError)    a bounded wait ran out; names who waited for what
├── Diverged (ArithmeticError)         a gradient is not finite; the weights are as they were before it
├── AccountingError (RuntimeError)     a group was lost or counted twice: a bug in Volley, never a user's fault
└── NoSignal (RuntimeError)            too many batches in a row gave no gradient; carries advice
"""

from pathlib import Path


class VolleyError(Exception):
    """Root of the tree; the command line prints these as one line and exits non-zero."""


class JobError(VolleyError, ValueError):
    """The job, or a file it names, can not be used as written. The message says what to write instead."""


class DataError(JobError):
    """A dataset row is malformed."""

    def __init__(self, path: Path | str, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path, self.line, self.problem = path, line, problem

    def __reduce__(self) -> tuple[type["DataError"], tuple[Path | str, int, str]]:
        return (DataError, (self.path, self.line, self.problem))


class HostError(VolleyError, RuntimeError):
    """This machine lacks something the run needs. The message names the fix."""


class DiskFull(HostError):
    """No room for a file. What was there before is untouched."""


class WeightsGone(HostError):
    """Published weights can not be had any more: they went with the node that held them, or never came."""


class GroupGone(HostError):
    """A group that was to go on went with the node that held it."""


class WorkerDied(VolleyError, RuntimeError):
    """A worker process ended without being asked to.

    Args:
        worker: its name, such as ``actor-0`` or ``learner-1``.
        cause: what is known of the death, one line.
        log_tail: its last log lines, may be empty.
    """

    def __init__(self, worker: str, cause: str, log_tail: str = "") -> None:
        tail = f"\nlast lines of {worker}:\n{log_tail}" if log_tail else ""
        super().__init__(f"{worker} died: {cause}{tail}")
        self.worker, self.cause, self.log_tail = worker, cause, log_tail

    def __reduce__(self) -> tuple[type["WorkerDied"], tuple[str, str, str]]:
        return (WorkerDied, (self.worker, self.cause, self.log_tail))


class DeadlineExceeded(VolleyError, TimeoutError):
    """A bounded wait ran out.

    Args:
        waiter: who waited, such as ``coordinator``.
        awaited: for what, such as ``learner-0: step 12``.
        seconds: the bound.
    """

    def __init__(self, waiter: str, awaited: str, seconds: float) -> None:
        super().__init__(f"{waiter} waited {seconds:g} s for {awaited}")
        self.waiter, self.awaited, self.seconds = waiter, awaited, seconds

    def __reduce__(self) -> tuple[type["DeadlineExceeded"], tuple[str, str, float]]:
        return (DeadlineExceeded, (self.waiter, self.awaited, self.seconds))


class Diverged(VolleyError, ArithmeticError):
    """A gradient is not finite. The weights are as they were before it."""


class AccountingError(VolleyError, RuntimeError):
    """``admitted = trained + dropped + in flight`` does not hold: a bug in Volley."""


class NoSignal(VolleyError, RuntimeError):
    """Too many batches in a row in which no group had two different rewards."""
