"""The observed state of a run, as its driver reports it: at every change, and every few seconds as a heartbeat.

A driver that stops reporting is taken for dead.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import TypedDict, Unpack

from services.store.folder import RunFolder
from services.store.outbox import Outbox
from volley.base import replaced
from volley.state import HEARTBEAT_SECONDS, Observed, RunState, WorkerView


class ObservedUpdate(TypedDict, total=False):
    """Some fields of `volley.state.Observed`, which documents them."""

    state: RunState
    problem: str
    step: int
    steps: int
    version: int
    checkpoint: int | None
    checkpointed: float | None
    life: int
    revision: int
    actors: int
    actors_wanted: int
    reward_workers: int
    reward_workers_wanted: int
    environment_workers: int
    environment_workers_wanted: int
    learner_ranks: int
    groups: dict[str, int]
    waiting: tuple[str, ...]
    workers: tuple[WorkerView, ...]
    sandbox: str
    driver: str
    started: float | None
    updated: float
    ended: float | None


class Status:
    """The run's `Observed`, and its reporting to Redis and to the run folder. Used from the driver's event loop only.

    Attributes:
        observed: the state reported last.
        source: called at every report for the fields that change on their own: counts, workers, waits.
    """

    def __init__(self, outbox: Outbox, before: Observed, folder: RunFolder | None = None) -> None:
        self._outbox, self._folder = outbox, folder
        self.source: Callable[[], ObservedUpdate] = ObservedUpdate
        self._before: RunState = "starting"  # the state that a pause interrupts
        self.observed = Observed(
            state="starting",
            life=before.life + 1,
            step=before.step,
            checkpoint=before.checkpoint,
            checkpointed=before.checkpointed,
            driver=f"{socket.gethostname()}:{os.getpid()}",
            started=before.started or time.time(),
        )

    def set(self, **changes: Unpack[ObservedUpdate]) -> None:
        """Change fields of the observed state and report it now. ``changes`` take precedence over `source`."""
        update: ObservedUpdate = {**self.source(), **changes, "updated": time.time()}
        self.observed = replaced(self.observed, **update)
        self._outbox.observed(self.observed)

    def pause(self, problem: str) -> None:
        """Report that the run is paused because of ``problem``, or with "" that it is what it was before.

        A state that was reported during the pause is newer than the one before it, and stays.
        """
        if problem and self.observed.state != "paused":
            self._before = self.observed.state
        if problem or self.observed.state == "paused":
            self.set(state="paused" if problem else self._before, problem=problem)

    def end(self, state: RunState, problem: str) -> None:
        """Report the end of the run: no process is left and nothing is under way."""
        self.source = ObservedUpdate
        self.set(
            state=state,
            problem=problem,
            ended=time.time(),
            workers=(),
            waiting=(),
            groups={},
            actors=0,
            actors_wanted=0,
            reward_workers=0,
            reward_workers_wanted=0,
            environment_workers=0,
            environment_workers_wanted=0,
            learner_ranks=0,
        )
        self._write()

    def _write(self) -> None:
        """Write the state to the run folder, for commands that are given the folder."""
        if self._folder is not None:
            with contextlib.suppress(OSError):  # on a full disk the run pauses, and Redis has the state
                self._folder.write_observed(self.observed)

    async def report_forever(self) -> None:
        """Report every `HEARTBEAT_SECONDS` until cancelled."""
        while True:
            self.set()
            self._write()
            await asyncio.sleep(HEARTBEAT_SECONDS)
