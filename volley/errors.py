"""Every error Volley raises on purpose.

VolleyError
├── JobError (ValueError)               the job, or a file it names, cannot be used as written
│   └── DataError                       a dataset row is malformed; names the file and the line
├── HostError (RuntimeError)            this machine lacks something: a port, memory, a package, a server
│   ├── DiskFull                        the disk has no space for a file; existing files are untouched
│   ├── WeightsGone                     published weights were lost with their node, or never arrived
│   ├── GroupGone                       a group waiting for its next turn was lost with its node
│   ├── ServerAway                      a Volley server does not answer
│   └── ToolUnavailable                 a tool cannot work now, so the episode that called it leaves its group
├── ApiError                            a Volley server rejected a request; carries status, kind and fields
│   ├── InvalidRequest (ValueError)     the request or the job is not valid, or the change is not possible
│   ├── NotAllowed                      the token is missing, unknown, or lacks the scope
│   ├── NotFound (LookupError)          there is no such run, process or token
│   ├── Conflict                        not in the present state: the run has ended, the name or key is taken
│   └── ServerBusy                      too many requests, or the server waits for Redis or Ray: try again
├── RunFailed (RuntimeError)            a run that was waited for has failed; carries its id and problem
├── WorkerDied (RuntimeError)           an actor, reward worker or learner rank died; carries its last log lines
├── DeadlineExceeded (TimeoutError)     a bounded wait ran out; names who waited for what
├── Diverged (ArithmeticError)          a gradient is not finite; the weights are those before the update
├── ServedWeightsDiffer (RuntimeError)  the actors' log-probs are not the learner's: they serve other weights
├── AccountingError (RuntimeError)      a group was lost or counted twice: a bug in Volley, never the user's fault
└── NoSignal (RuntimeError)             too many batches in a row gave no gradient; carries advice
RunStopped                              the user asked the run to end; no failure, so no VolleyError
"""

from collections.abc import Mapping
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


class ToolUnavailable(HostError):
    """A tool cannot work now. The episode that called it leaves its group, as that says nothing about the model.

    Tool functions of users may raise it.
    """


class ServerAway(HostError):
    """A Volley server does not answer."""


class ApiError(VolleyError):
    """A Volley server rejected a request. The message is the server's, with one line per rejected field.

    Attributes:
        status: HTTP status.
        kind: kind of problem, such as ``run-has-ended``; empty if the answer does not say.
        fields: what is wrong with each rejected field, by JSON pointer, such as ``/job/steps``.
        retry_after: seconds after which to try again, if the server says so.
        exit_code: of the command line.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        status: int,
        kind: str = "",
        fields: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.fields, self.retry_after = status, kind, dict(fields or {}), retry_after

    def __reduce__(self) -> tuple[type["ApiError"], tuple[str, int, str, dict[str, str], float | None]]:
        return (type(self), (str(self), self.status, self.kind, self.fields, self.retry_after))


class InvalidRequest(ApiError, ValueError):
    """The request or the job is not valid, or a change is not possible. The message says what to write instead."""


class NotAllowed(ApiError):
    """The token is missing, unknown, or lacks the scope."""


class NotFound(ApiError, LookupError):
    """There is no such run, process or token; or several runs have ids that begin so."""

    exit_code = 3


class Conflict(ApiError):
    """The request does not fit the present state: the run has ended, or has not; the name or key is taken."""

    exit_code = 4


class ServerBusy(ApiError):
    """Too many requests, or the server waits for Redis or Ray. Try again after ``retry_after`` seconds."""


class RunFailed(VolleyError, RuntimeError):
    """A run that was waited for has failed.

    Args:
        run_id: its id.
        problem: why, as the run reported it.
    """

    def __init__(self, run_id: str, problem: str) -> None:
        super().__init__(f"run {run_id} failed: {problem or 'its logs say why'}")
        self.run_id, self.problem = run_id, problem

    def __reduce__(self) -> tuple[type["RunFailed"], tuple[str, str]]:
        return (RunFailed, (self.run_id, self.problem))


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
