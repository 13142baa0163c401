"""Every error Volley raises on purpose.

VolleyError
├── JobError (ValueError)               the job, or a file it names, cannot be used as written
│   └── DataError                       a dataset row is malformed; names the file and the line
├── HostError (RuntimeError)            this machine lacks something: a port, memory, a package, a server
│   ├── DiskFull                        the disk has no space for a file; existing files are untouched
│   ├── WeightsGone                     published weights were lost with their node, or never arrived
│   └── GroupGone                       a group waiting for its next turn was lost with its node
├── WorkerDied (RuntimeError)           an actor, reward worker or learner rank died; carries its last log lines
├── DeadlineExceeded (TimeoutError)     a bounded wait ran out; names who waited for what
├── Diverged (ArithmeticError)          a gradient is not finite; the weights are those before the step
├── ServedWeightsDiffer (RuntimeError)  the actors' log-probs are not the learner's: they serve other weights
├── AccountingError (RuntimeError)      a group was lost or counted twice: a bug in Volley, never the user's fault
└── NoSignal (RuntimeError)             too many batches in a row gave no gradient; carries advice
RunStopped                              the user asked the run to end; no failure, so no VolleyError
"""

from pathlib import Path


class VolleyError(Exception):
    """Root of the tree. The command line prints the message and exits with a non-zero status."""


class JobError(VolleyError, ValueError):
    """The job, or a file it names, cannot be used as written. The message says what to write instead."""


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
    """The disk has no space for a file. Existing files are untouched."""


class WeightsGone(HostError):
    """Published weights are no longer available: they were lost with their node, or never arrived."""


class GroupGone(HostError):
    """A group waiting for its next turn was lost with the node that held it."""


class WorkerDied(VolleyError, RuntimeError):
    """A worker process ended without being asked to.

    Args:
        worker: its name, such as ``actor-0`` or ``learner-1``.
        cause: why it died, one line.
        log_tail: its last log lines; may be empty.
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
        awaited: what it waited for, such as ``learner-0: step 12``.
        seconds: the limit.
    """

    def __init__(self, waiter: str, awaited: str, seconds: float) -> None:
        super().__init__(f"{waiter} waited {seconds:g} s for {awaited}")
        self.waiter, self.awaited, self.seconds = waiter, awaited, seconds

    def __reduce__(self) -> tuple[type["DeadlineExceeded"], tuple[str, str, float]]:
        return (DeadlineExceeded, (self.waiter, self.awaited, self.seconds))


class Diverged(VolleyError, ArithmeticError):
    """A gradient is not finite. The weights are those before the step."""


class ServedWeightsDiffer(VolleyError, RuntimeError):
    """After an update the actors' log-probs are not the learner's, so they generate with other weights."""


class AccountingError(VolleyError, RuntimeError):
    """``admitted = trained + dropped + in flight`` does not hold: a bug in Volley."""


class NoSignal(VolleyError, RuntimeError):
    """In too many batches in a row, no group had two different rewards."""


class RunStopped(Exception):
    """The user asked the run to end. This is no failure, so it is no `VolleyError`."""
