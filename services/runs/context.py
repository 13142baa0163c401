"""What a run of any kind works with, and the waits that every kind shares."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.control.heartbeat import Status
from services.jobs.job_file import Job
from services.jobs.needs import Needs
from services.recording.display import Display
from services.recording.recorder import RunRecorder
from services.recording.sinks.sinks import Sinks
from services.signals import StopSignal
from services.stack.ray import ClusterReservation
from services.store.desired import newest_desired
from services.store.folder import RunFolder
from services.store.outbox import Outbox
from services.store.redis import Store
from services.tasks import cancel_all
from volley.errors import HostError, JobError, RunStopped
from volley.state import Desired, Observed

POLL_SECONDS = 1.0
LEASE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Context:
    """What one driver of a run works with: where the run writes, how it reports, and how it is stopped.

    Attributes:
        recorder: records what runs of every kind report; its ``disk`` guards what they write.
        checkpoint: the checkpoint an rl run resumes from; None starts it from the model's own weights. Runs of the
            other kinds look in the run folder.
        stop_signal: how a signal ends the run.
        summary_fields: further fields of ``summary.json``, which the run fills in.
    """

    folder: RunFolder
    store: Store
    outbox: Outbox
    display: Display
    status: Status
    sinks: Sinks
    recorder: RunRecorder
    checkpoint: Path | None = None
    stop_signal: StopSignal = field(default_factory=StopSignal)
    summary_fields: dict[str, object] = field(default_factory=dict)
    _troubles: set[str] = field(default_factory=set)  # why the desired state cannot be applied; printed once each

    async def desired(self) -> Desired:
        """The run's desired state; raises `JobError` if the file in the run folder is invalid."""
        return await newest_desired(self.folder, self.store)

    async def stopped_by_user(self) -> bool:
        """Whether the user has stopped the run. A desired state that is invalid is reported, and the run goes on."""
        try:
            stopped = (await self.desired()).stopped
        except (JobError, ValueError) as error:
            self._report_trouble(f"the desired state cannot be applied: {error}")
            return False
        if self.status.observed.problem in self._troubles:
            self.status.set(problem="")
        self._troubles.clear()
        return stopped

    def _report_trouble(self, problem: str) -> None:
        shown = self.status.observed.problem
        if shown != problem and (not shown or shown in self._troubles):
            self.status.set(problem=problem)
        if problem not in self._troubles:
            self._troubles.add(problem)
            self.display.say(f"  {problem}")

    def stop_exception(self) -> BaseException:
        """The exception to raise after the final checkpoint: CancelledError after a signal, else RunStopped."""
        return asyncio.CancelledError() if self.stop_signal.signalled else RunStopped()


class Run(Protocol):
    """A job whose data, model and scorer have been read and checked. One class per kind of job implements it."""

    @property
    def job(self) -> Job: ...

    async def run(self, context: Context) -> None:
        """Start the processes, do the work, and leave the results in the run folder.

        Raises:
            RunStopped: the user stopped the run.
            CancelledError: a signal stopped it.
        """
        ...


@contextlib.asynccontextmanager
async def heartbeats(status: Status, display: Display) -> AsyncIterator[None]:
    """Report the run's state at regular intervals while the block runs, and say what it does when it is silent."""
    reporting = asyncio.create_task(status.report_forever(), name="heartbeat")
    talking = asyncio.create_task(_keep_talking(status, display), name="display")
    try:
        yield
    finally:
        await cancel_all((reporting, talking))


async def _keep_talking(status: Status, display: Display) -> None:
    while True:
        await asyncio.sleep(POLL_SECONDS)
        display.idle(doing(status.observed))


def doing(observed: Observed) -> str:
    """What the run is doing, in a few words."""
    match observed.state:
        case "starting" if observed.step >= observed.steps > 0:
            return "writing the model"
        case "starting" | "stopping":
            return f"still {observed.state}"
        case "running" if observed.groups:
            groups = "  ".join(f"{name} {count}" for name, count in observed.groups.items())
            return "  ".join([f"groups: {groups}", *observed.waiting[:1]])
        case "running":
            return "working"
        case state:
            return f"{state}: {observed.problem}" if observed.problem else state


@contextlib.asynccontextmanager
async def start_turn(context: Context, needs: Needs) -> AsyncIterator[None]:
    """Wait until the cluster has the resources for the run, then hold the only turn to start processes.

    No other run that uses the same Redis starts its roles during the block.

    Raises:
        RunStopped: the user stopped the run while it waited.
    """
    owner = f"{context.folder.run_id}:{os.getpid()}"
    reservation = await asyncio.to_thread(ClusterReservation, needs)
    try:
        while obstacle := await _try_to_start(context.store, owner, reservation):
            if context.status.observed.problem != obstacle:
                context.display.say(f"  pending: {obstacle}")
            context.status.set(state="pending", problem=obstacle)
            await asyncio.sleep(POLL_SECONDS)
            if await context.stopped_by_user():
                raise RunStopped
    finally:
        await asyncio.to_thread(reservation.leave)
    renewing = asyncio.create_task(_renew(context.store, owner))
    try:
        context.status.set(state="starting", problem="")
        yield
    finally:
        await cancel_all((renewing,))  # before the release: a renewal after it would take the lease again
        with contextlib.suppress(HostError):  # Redis is away: the lease runs out, and the run has started
            await context.store.release("starting", owner)


async def _try_to_start(store: Store, owner: str, reservation: ClusterReservation) -> str:
    """Why the run cannot start its roles yet. An empty string means that it holds the lease and may start."""
    if not await store.lease("starting", owner, LEASE_SECONDS):
        return "waits for another run that is starting"
    lacking = await asyncio.to_thread(reservation.lacking)
    if lacking:
        await store.release("starting", owner)
    return lacking


async def _renew(store: Store, owner: str) -> None:
    while True:
        await asyncio.sleep(LEASE_SECONDS / 3)
        with contextlib.suppress(HostError):  # while Redis is down, no other run can take the lease either
            await store.lease("starting", owner, LEASE_SECONDS)


async def run_until_stopped(context: Context, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; cancel it and raise `RunStopped` when the user stops the run.

    Work inside a `StopSignal.grace_period` is not cancelled: it is asked to stop, and ends at its next checkpoint.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
            if await context.stopped_by_user() and not context.stop_signal.request():
                raise RunStopped
        await task
    finally:
        await cancel_all((task,))
