"""What a run of any kind works with, and waits that every kind has."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.display import Display
from services.foreground import Ending
from services.local_ray import Room
from services.needs import Needs
from services.outbox import Outbox
from services.run_folder import RunFolder
from services.start import cancel_all
from services.state import Desired
from services.status import Status
from services.steering import newest_desired
from services.store import Store
from volley.errors import HostError

if TYPE_CHECKING:
    from services.sinks.sinks import Sinks

LOOK_SECONDS = 1.0
LEASE_SECONDS = 30.0


class RunStopped(Exception):
    """Its user wants the run to end here."""


@dataclass(frozen=True, slots=True)
class Context:
    """One life of a run: where it writes, what it says, how it stands.

    Attributes:
        ending: how a signal ends it.
        facts: what the run's summary says besides how it ended.
    """

    folder: RunFolder
    store: Store
    outbox: Outbox
    display: Display
    status: Status
    sinks: "Sinks"
    ending: Ending = field(default_factory=Ending)
    facts: dict[str, Any] = field(default_factory=dict)

    async def desired(self) -> Desired:
        """What is desired of the run; raises `JobError` where the folder's file does not say it properly."""
        return await newest_desired(self.folder, self.store)

    def left(self) -> BaseException:
        """What a run raises that has ended at a checkpoint: after a signal, what that would have done to it at once."""
        return asyncio.CancelledError() if self.ending.signalled else RunStopped()


@contextlib.asynccontextmanager
async def beating(status: Status) -> AsyncIterator[None]:
    """For the length of the block the run reports that it lives."""
    beat = asyncio.create_task(status.beat(), name="heartbeat")
    try:
        yield
    finally:
        beat.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beat


@contextlib.asynccontextmanager
async def its_turn(context: Context, needs: Needs) -> AsyncIterator[None]:
    """Wait until the cluster has room for the run; no other run of this Redis starts its roles during the block.

    Raises:
        RunStopped: the user gave up waiting.
    """
    owner = f"{context.folder.run_id}:{os.getpid()}"
    room = await asyncio.to_thread(Room, needs)
    try:
        while why := await _not_yet(context.store, owner, room):
            if context.status.observed.problem != why:
                context.display.say(f"  pending: {why}")
            context.status.set(state="pending", problem=why)
            await asyncio.sleep(LOOK_SECONDS)
            if (await context.desired()).stopped:
                raise RunStopped
    finally:
        await asyncio.to_thread(room.leave)
    renewing = asyncio.create_task(_renew(context.store, owner))
    try:
        context.status.set(state="starting", problem="")
        yield
    finally:
        await cancel_all((renewing,))  # one that went on would take the lease again
        await context.store.release("starting", owner)


async def _not_yet(store: Store, owner: str, room: Room) -> str:
    """Why the run can not start its roles now; with nothing, it has the lease and may."""
    if not await store.lease("starting", owner, LEASE_SECONDS):
        return "waits for another run that is starting"
    lacking = await asyncio.to_thread(room.lacking)
    if lacking:
        await store.release("starting", owner)
    return lacking


async def _renew(store: Store, owner: str) -> None:
    while True:
        await asyncio.sleep(LEASE_SECONDS / 3)
        with contextlib.suppress(HostError):  # Redis is away: so it is for every other run
            await store.lease("starting", owner, LEASE_SECONDS)


async def ends_when_stopped(context: Context, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; raises `RunStopped` when the run is to be stopped before it ends.

    Work that holds the run's end is told of it and ends by itself.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            if (await context.desired()).stopped and not context.ending.ask():
                raise RunStopped
        await task
    finally:
        await cancel_all((task,))
