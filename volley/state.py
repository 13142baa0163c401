"""The state of a run: stored as JSON in Redis and returned by the REST API.

RunRecord   what was submitted: written once, when the run is created
Desired     what users want: written by the command line and the API, read by the run's driver
Observed    what is: written every few seconds by the run's driver, and by the supervisor when no driver is left
Place       its place in the queue: written by the supervisor, until the run has ended
Limits      what the owner of a token may use
AuditRecord who changed what: written together with the change, and never changed
"""

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from volley.base import Spec

RunState = Literal["queued", "pending", "starting", "running", "paused", "stopping", "stopped", "done", "failed"]
ENDED: frozenset[str] = frozenset({"stopped", "done", "failed"})
HEARTBEAT_SECONDS = 2.0  # between reports of a live driver
LOST_SECONDS = 30.0  # a driver that is silent for this long is dead or disconnected
MAX_PRIORITY = 10


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("write a number, not true or false")
    return value


Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(_no_truth_value)]
PlaceState = Literal["waiting", "admitted", "stopping"]


class RunRecord(Spec):
    """A run as it was submitted."""

    id: str
    name: str
    kind: str
    job: dict[str, Any] = Field(description="the resolved job")
    created: float = Field(description="seconds since 1970")
    folder: str = Field(description="run folder, on the driver's file system")
    tags: dict[str, str] = Field(default_factory=dict)
    owner: str = Field("", description="name of the token that submitted it; empty if none was needed")


class Desired(Spec):
    """Changes to a live run. Null or empty fields have the job's values."""

    revision: int = Field(0, ge=0, description="number of changes; a higher one is newer")
    actors: int | None = Field(None, ge=0, le=10_000, description="actors; 0 pauses generation")
    reward_workers: int | None = Field(None, ge=1, le=10_000)
    environment_workers: int | None = Field(None, ge=1, le=10_000)
    paused: bool = Field(False, description="start no new groups; those in flight are finished and trained on")
    stopped: bool = Field(False, description="write a checkpoint and end; a resumed run continues from it")
    objective: dict[str, Any] = Field(default_factory=dict, description="fields that override the objective's")
    learning_rate: float | None = Field(None, gt=0, description="overrides the schedule's learning rate")
    max_lag: int | None = Field(None, ge=0, le=10_000, description="applies to groups admitted from now on")
    priority: Priority = Field(0, description="in the queue of the service; runs of higher priority start first")


class WorkerView(Spec):
    """One process of a run; see `volley.records.WorkerInfo`."""

    name: str
    role: Literal["actor", "reward_worker", "environment_worker", "learner_rank"]
    state: Literal["starting", "serving", "draining"]
    pid: int = 0
    version: int | None = Field(None, description="version of the weights that an actor serves")
    busy: int = Field(0, description="samples in flight on an actor, groups on a reward worker, episodes")


class Observed(Spec):
    """The state of a run as its driver reports it. Times are in seconds since 1970."""

    state: RunState = "queued"
    problem: str = Field("", description="why it is pending, paused or failed")
    step: int = Field(0, description="steps done")
    steps: int = 0
    version: int = 0
    checkpoint: int | None = Field(None, description="step of the newest checkpoint")
    checkpointed: float | None = Field(None, description="when the newest checkpoint was written")
    life: int = Field(0, description="number of the run's driver: 1 is the first, each restart adds one")
    revision: int = Field(0, description="revision of the desired state that is in effect")
    actors: int = Field(0, description="actors that serve")
    actors_wanted: int = 0
    reward_workers: int = 0
    reward_workers_wanted: int = 0
    environment_workers: int = 0
    environment_workers_wanted: int = 0
    learner_ranks: int = 0
    groups: dict[str, int] = Field(default_factory=dict, description="generating, scoring, ready, held, slots")
    waiting: tuple[str, ...] = Field((), description="what the run waits for and how long, from the watchdog")
    workers: tuple[WorkerView, ...] = ()
    sandbox: str = Field("", description="the reward workers' isolation")
    driver: str = Field("", description="host and process id of the driver")
    started: float | None = None
    updated: float = 0.0
    ended: float | None = None

    def lost(self, now: float | None = None) -> bool:
        """Return whether the run has not ended but its driver has been silent for too long."""
        silent = (time.time() if now is None else now) - self.updated
        return self.state not in ENDED and self.state != "queued" and silent > LOST_SECONDS


class Place(Spec):
    """The place of a run in the queue of the service. Times are in seconds since 1970."""

    run: str
    owner: str
    priority: int
    submitted: float = Field(description="when it was submitted, or resumed after it had ended")
    state: PlaceState = Field(
        "waiting", description="admitted: it holds its resources; stopping: it is preempted, and ends at a checkpoint"
    )
    since: float = Field(description="when this state began")
    position: int | None = Field(None, description="among the runs that wait, from 1")
    reason: str = Field("", description="why it waits")
    preempted_by: str = Field("", description="the run that preempted it last")
    resources: dict[str, float] = Field(description="what it reserves, by Ray's resource name")
    most: dict[str, float] = Field(description="the same if it scales itself up to its limit; counts against quotas")


class Limits(Spec):
    """What the owner of a token may use. Null is unlimited."""

    runs: Annotated[int | None, BeforeValidator(_no_truth_value)] = Field(
        None, ge=0, le=1_000_000, description="runs at once"
    )
    cpus: Annotated[float | None, BeforeValidator(_no_truth_value)] = Field(
        None, ge=0, le=1e9, description="CPUs that these runs reserve"
    )
    gpus: Annotated[float | None, BeforeValidator(_no_truth_value)] = Field(None, ge=0, le=1e9)
    priority: Priority = Field(0, description="the highest priority that it may give a run")


class AuditRecord(Spec):
    """One change that somebody made."""

    time: float = Field(description="seconds since 1970")
    who: str = Field(description="name of the token; or anybody, bootstrap, supervisor, run-folder")
    action: str = Field(description="submit, set, stop, resume, delete, preempt; create, limit, delete token")
    run: str = Field("", description="id of the run; empty if it is about a token")
    details: dict[str, Any] = Field(default_factory=dict, description="what was set")


def objective_text(objective: Mapping[str, Any]) -> str:
    """Format an objective as in ``max_at_k k=8``, ``max_at_k 1:0.5 8:0.5`` or ``max_at_k harmonic 16``."""
    kind, weights = str(objective.get("kind", "")), objective.get("weights")
    if isinstance(weights, Mapping):
        return " ".join([kind, *(f"{k}:{weight:g}" for k, weight in weights.items())])
    if weights == "harmonic":
        return f"{kind} {weights} {objective.get('order')}"
    return f"{kind} k={objective['k']}" if kind and objective.get("k") is not None else kind
