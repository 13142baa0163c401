"""What Redis holds of a run, typed. JSON in Redis, the models of the REST API, and what a driver reports.

RunRecord   written once, when the run is created
Desired     what users want of it: written by the command line and the API, read by the run's coordinator
Observed    how it stands: written by the run's driver alone, every few seconds
"""

import time
from typing import Any, Literal

from pydantic import Field

from volley.base import Spec

RunState = Literal["queued", "pending", "starting", "running", "paused", "stopping", "stopped", "done", "failed"]
ENDED: frozenset[str] = frozenset({"stopped", "done", "failed"})
HEARTBEAT_SECONDS = 2.0  # between reports of a live driver
LOST_SECONDS = 30.0  # a driver silent for so long is dead or cut off


class RunRecord(Spec):
    """A run as it was asked for."""

    id: str
    name: str
    kind: str
    job: dict[str, Any] = Field(description="the resolved job")
    created: float = Field(description="seconds since 1970")
    folder: str = Field(description="run folder, on the driver's file system")
    tags: dict[str, str] = Field(default_factory=dict)


class Desired(Spec):
    """Changes to a live run. What is null or empty is as the job says."""

    revision: int = Field(0, ge=0, description="counts the changes; the higher one is the newer")
    actors: int | None = Field(None, ge=0, le=10_000, description="actors; 0 pauses generation")
    reward_workers: int | None = Field(None, ge=1, le=10_000)
    paused: bool = Field(False, description="no group is admitted; those under way are finished and trained on")
    stopped: bool = Field(False, description="write a checkpoint and end; resuming goes on from it")
    objective: dict[str, Any] = Field(default_factory=dict, description="fields in place of the objective's")
    learning_rate: float | None = Field(None, gt=0, description="in place of the schedule's")
    max_lag: int | None = Field(None, ge=0, le=10_000, description="for groups admitted from now on")


class WorkerView(Spec):
    """One process of a run; see `volley.records.WorkerInfo`."""

    name: str
    role: Literal["actor", "reward_worker", "learner_rank"]
    state: Literal["starting", "serving", "draining"]
    pid: int = 0
    version: int | None = Field(None, description="of the weights an actor serves")
    busy: int = Field(0, description="samples in flight on an actor, groups on a reward worker")


class Observed(Spec):
    """How a run stands. Times in seconds since 1970."""

    state: RunState = "queued"
    problem: str = Field("", description="why it is pending, paused or failed")
    step: int = Field(0, description="steps done")
    steps: int = 0
    version: int = 0
    checkpoint: int | None = Field(None, description="steps in the newest checkpoint written")
    checkpointed: float | None = Field(None, description="when it was")
    life: int = Field(0, description="drivers it has had: 1 is the first, each resume adds one")
    revision: int = Field(0, description="of the desired state that holds")
    actors: int = Field(0, description="actors that serve")
    actors_wanted: int = 0
    reward_workers: int = 0
    reward_workers_wanted: int = 0
    learner_ranks: int = 0
    groups: dict[str, int] = Field(default_factory=dict, description="generating, scoring, ready, held, slots")
    waiting: tuple[str, ...] = Field((), description="the watchdog's words: who waits for whom, and how long")
    workers: tuple[WorkerView, ...] = ()
    sandbox: str = Field("", description="the reward workers' isolation")
    driver: str = Field("", description="host and process id of the driver")
    started: float | None = None
    updated: float = 0.0
    ended: float | None = None

    def lost(self, now: float | None = None) -> bool:
        """Has the driver of a run that has not ended been silent for too long?"""
        silent = (time.time() if now is None else now) - self.updated
        return self.state not in ENDED and self.state != "queued" and silent > LOST_SECONDS
