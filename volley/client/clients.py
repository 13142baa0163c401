"""The two forms of the client, `Client` and `AsyncClient`, and of the runs that they return."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from volley.client import routes
from volley.client.changes import desired_changes, worker_counts
from volley.client.http import AwaitingHttp, BlockingHttp
from volley.client.live import LiveEvent, LiveView, Update, events, steps, updates
from volley.client.operations import Awaiting, Blocking, Operation, T, Watch, operation, watch
from volley.client.results import Evaluations, LogPiece, Metrics
from volley.client.routes import Job
from volley.state import Limits
from volley.views import (
    AuditView,
    ClusterView,
    Event,
    ExportView,
    LogFile,
    MadeToken,
    QueueView,
    RunSummary,
    RunView,
    SampleView,
    Scope,
    TokenView,
)

C = TypeVar("C", bound="BlockingHttp | AwaitingHttp")
LOG_BYTES = 65_536


class _RunOperations(Generic[C]):
    """A run of the service. Every method asks the server; nothing is kept here but the id.

    Attributes:
        id: the id of the run.
        client: what it was found with, which must still be open.
    """

    def __init__(self, client: C, run_id: str) -> None:
        self.client: C = client
        self.id = run_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    @property
    def url(self) -> str:
        """The run's page on the dashboard."""
        return f"{self.client.server}/#/runs/{self.id}"

    @operation
    def view(self) -> Operation[RunView]:
        """Return what was submitted, what is desired and what the run reports; ``state`` may also be ``lost``."""
        return routes.view(self.id)

    @operation
    def wait(self, timeout: float | None = None) -> Operation[RunView]:
        """Return once the run is done or stopped, also if its server restarts meanwhile.

        Raises:
            RunFailed: the run has failed.
            DeadlineExceeded: it has not ended within ``timeout`` seconds; it goes on.
            ServerAway: the server has not answered for two minutes.
        """
        return routes.wait(self.id, timeout)

    @watch
    def follow(self, *, since_start: bool = False) -> Watch[Update]:
        """Yield states, steps, events and evaluations until the run has ended and all of them were read.

        A broken connection is opened again, without a gap. A resumed run repeats some steps, and the later ones count.

        Args:
            since_start: also yield everything from before this call.
        """
        return LiveView(self.id, self._live, updates, since_start=since_start)

    @watch
    def steps(self, *, since_start: bool = True) -> Watch[dict[str, Any]]:
        """Yield the metrics of each step, from the first one on, until the run has ended; see `follow`."""
        return LiveView(self.id, self._live, steps, since_start=since_start)

    @watch
    def live(self) -> Watch[LiveEvent]:
        """Yield the events of the live view from now on, as the server sends them, without end."""
        return LiveView(self.id, self._live, events, endless=True)

    @operation
    def metrics(
        self, *names: str, first: int = 0, last: int | None = None, points: int | None = None
    ) -> Operation[Metrics]:
        """Return metrics by step, as arrays.

        Args:
            names: which; all, if none is named. A name that the run does not have is left out.
            first, last: the steps, inclusive; None for the newest.
            points: limit on the rows, 1 to 5000; each is then the mean of a bucket of steps. None returns every row.
        """
        return routes.metrics(self.id, names, first, last, points)

    @operation
    def evaluations(self) -> Operation[Evaluations]:
        """Return the evaluations on held-out prompts, by version."""
        return routes.evaluations(self.id)

    @operation
    def events(self, limit: int | None = 200, kind: str | None = None) -> Operation[list[Event]]:
        """Return the newest ``limit`` events, oldest first; None for all of them."""
        return routes.events(self.id, limit, kind)

    @operation
    def samples(
        self,
        limit: int = 50,
        *,
        step: int | None = None,
        group: int | None = None,
        status: str | None = None,
        prompt_id: str | None = None,
        min_reward: float | None = None,
    ) -> Operation[list[SampleView]]:
        """Return samples that the run has logged: newest step first, then group by group, best reward first."""
        filters = {"step": step, "group": group, "status": status, "prompt_id": prompt_id, "min_reward": min_reward}
        return routes.samples(self.id, limit, filters)

    @operation
    def ledger(self) -> Operation[dict[str, int]]:
        """Return the numbers of groups admitted, trained on, dropped (by reason) and in flight."""
        return routes.ledger(self.id)

    @operation
    def processes(self) -> Operation[list[LogFile]]:
        """Return the run's processes that have a log."""
        return routes.log_files(self.id)

    @operation
    def logs(self, process: str = "driver", tail: int = LOG_BYTES) -> Operation[str]:
        """Return the last ``tail`` bytes, at most 1 MiB, of a process's log. Raises `NotFound` if there is none."""
        return (yield from routes.log_piece(self.id, process, tail, None)).text

    @operation
    def log_piece(self, process: str, most: int = LOG_BYTES, offset: int | None = None) -> Operation[LogPiece]:
        """Return at most ``most`` bytes of a log from ``offset``, by default its end, and the next offset."""
        return routes.log_piece(self.id, process, most, offset)

    @operation
    def set(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> Operation[RunView]:
        """Change a live run, as `volley set` does: ``set(k=4, learning_rate=1e-6)`` or ``set({"objective.k": 4})``.

        None reverts a field to the job's value. The run applies the change within seconds.

        Raises:
            InvalidRequest: the change is not possible in this job.
            Conflict: the run has ended.
        """
        return routes.change(self.id, desired_changes({**(changes or {}), **more}))

    @operation
    def change(self, fields: Mapping[str, Any], revision: int | None = None) -> Operation[RunView]:
        """Change fields of the desired state, as in docs/api.md.

        Raises:
            Conflict: ``revision`` is given and is not that of the desired state: somebody else has changed the run.
        """
        return routes.change(self.id, fields, revision)

    @operation
    def scale(
        self, actors: int | None = None, reward_workers: int | None = None, environment_workers: int | None = None
    ) -> Operation[RunView]:
        """Change the number of actors, where 0 pauses generation, of reward workers and of environment workers."""
        return routes.change(self.id, worker_counts(actors, reward_workers, environment_workers))

    @operation
    def pause(self) -> Operation[RunView]:
        """Start no new groups; those in flight are finished and trained on."""
        return routes.change(self.id, {"paused": True})

    @operation
    def resume(self) -> Operation[RunView]:
        """Resume a run that is paused, stopped or failed, from its newest checkpoint."""
        return routes.resume(self.id)

    @operation
    def stop(self) -> Operation[RunView]:
        """Make the run write a checkpoint and end."""
        return routes.stop(self.id)

    @operation
    def export(self, checkpoint: int | None = None) -> Operation[ExportView]:
        """Return where the model lies, or a checkpoint for `volley export`; nothing is copied."""
        return routes.export(self.id, checkpoint)

    @operation
    def delete(self) -> Operation[None]:
        """Remove the run, which must have ended, from the service. Its run folder stays."""
        return routes.delete(self.id)

    @property
    def _live(self) -> str:
        return routes.run_path(self.id, "live")


class Run(_RunOperations["Client"], Blocking):
    __doc__ = _RunOperations.__doc__

    def _run(self, steps: Operation[T]) -> T:
        return self.client._run(steps)

    def _watch(self, watch: Watch[T]) -> Iterator[T]:
        return self.client._watch(watch)


class AsyncRun(_RunOperations["AsyncClient"], Awaiting):
    __doc__ = _RunOperations.__doc__

    async def _run(self, steps: Operation[T]) -> T:
        return await self.client._run(steps)

    def _watch(self, watch: Watch[T]) -> AsyncIterator[T]:
        return self.client._watch(watch)


class _ClientOperations:
    """What both forms of the client do."""

    @operation
    def check(self, job: Job, *, folder: Path | None = None) -> Operation[None]:
        """Raise `InvalidRequest` if the server would not accept the job; see `submit`."""
        return routes.check(job, folder)

    @operation
    def runs(
        self,
        limit: int = 50,
        *,
        state: str | None = None,
        kind: str | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        id_prefix: str | None = None,
    ) -> Operation[list[RunSummary]]:
        """Return summaries of at most ``limit`` runs, newest first.

        Args:
            state: such as ``running`` or ``lost``.
            name: part of the name.
            tags: all of them must match.
        """
        tag = [f"{name}={value}" for name, value in (tags or {}).items()]
        return routes.runs(limit, {"state": state, "kind": kind, "name": name, "tag": tag, "id_prefix": id_prefix})

    @operation
    def cluster(self) -> Operation[ClusterView]:
        """Return the machines, their resources, and which run holds which of them."""
        return routes.cluster()

    @operation
    def queue(self) -> Operation[QueueView]:
        """Return the runs that hold resources, those that wait and why, and what each owner holds."""
        return routes.queue()

    @operation
    def audit(self, limit: int = 200, *, run: str | None = None, who: str | None = None) -> Operation[list[AuditView]]:
        """Return the newest ``limit`` records of who changed what, newest first.

        Args:
            run: id of a run; only its changes.
            who: name of a token; only its changes.
        """
        return routes.audit(limit, {"run": run, "who": who})

    @operation
    def tokens(self) -> Operation[list[TokenView]]:
        """Return names, scopes and limits of all tokens."""
        return routes.tokens()

    @operation
    def create_token(self, name: str, scope: Scope = "read", limits: Limits | None = None) -> Operation[MadeToken]:
        """Create a token; only this answer contains it."""
        return routes.create_token(name, scope, limits or Limits())

    @operation
    def limit_token(self, name: str, limits: Limits) -> Operation[TokenView]:
        """Replace the limits of a token's runs."""
        return routes.limit_token(name, limits)

    @operation
    def delete_token(self, name: str) -> Operation[None]:
        """Delete a token; the server rejects it within two seconds."""
        return routes.delete_token(name)


class Client(_ClientOperations, BlockingHttp):
    """A Volley server. Use as a context manager, or call `close`.

    Without arguments it is the server that the command line uses: `VOLLEY_SERVER` and `VOLLEY_TOKEN`, the configuration
    file, or the stack of `volley up`.

    Args:
        timeout: seconds that an answer may take.
        transport: replaces the network, for tests.

    Raises:
        HostError: there is no server, or the configuration file is invalid.
        JobError: ``server`` is not a URL.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False

    def submit(
        self,
        job: Job,
        *,
        tags: Mapping[str, str] | None = None,
        key: str | None = None,
        folder: Path | None = None,
        priority: int = 0,
    ) -> Run:
        """Submit a job and return its run, which starts when its turn in the queue has come; see `queue`.

        Args:
            job: a dict as in a job file, or an object of one of the classes in `volley.job`.
            key: idempotency key: submitting the same job with the same key again returns the same run.
            folder: what relative paths in the job are relative to; None for the current folder.
            priority: -10 to 10; a run of higher priority starts first and may preempt others.

        Raises:
            InvalidRequest: the job is not valid, or the server does not accept it; the message says what to write.
            NotAllowed: the token may not give a run this priority.
            Conflict: ``key`` was used for another job.
        """
        return Run(self, self._run(routes.create(job, folder, tags, key, priority)).record.id)

    def run(self, run_id: str) -> Run:
        """Return the run whose id is, or begins with, ``run_id``. Raises `NotFound` if there is none, or several."""
        return Run(self, self._run(routes.find(run_id)))


class AsyncClient(_ClientOperations, AwaitingHttp):
    """The asynchronous form of `Client`, with the same arguments and methods; its methods are awaited."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        await self.close()
        return False

    async def submit(
        self,
        job: Job,
        *,
        tags: Mapping[str, str] | None = None,
        key: str | None = None,
        folder: Path | None = None,
        priority: int = 0,
    ) -> AsyncRun:
        """See `Client.submit`."""
        return AsyncRun(self, (await self._run(routes.create(job, folder, tags, key, priority))).record.id)

    async def run(self, run_id: str) -> AsyncRun:
        """See `Client.run`."""
        return AsyncRun(self, await self._run(routes.find(run_id)))
