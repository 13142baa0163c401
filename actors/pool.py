"""The actors of one run: the pool assigns groups, distributes weights, replaces dead actors and scales.

starting ──newest weights──> serving ──scale down──> draining ──> stopped
                                │
                                └─ dies: other actors generate its groups again, a replacement starts
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.config import (
    ActorConfig,
    ActorInfo,
    ActorUpdate,
    BroadcastReport,
    EpisodesRequest,
    GenerateRequest,
    OpenedSessions,
)
from actors.dealing import LeastLoaded
from actors.gateway.groups import EpisodeReport
from actors.handle import ActorHandle
from actors.late_weights import LateWeights
from volley.errors import DeadlineExceeded, VolleyError, WeightsGone, WorkerDied
from volley.records import Group, GroupMeta, WeightUpdate, WorkerInfo
from volley.refs import Ref
from volley.restarts import Restarts
from volley.weight_group import WeightGroupTerms

log = logging.getLogger(__name__)
_T = TypeVar("_T")
PING_EVERY = 5.0  # seconds


class ActorPool:
    """Lives in the coordinator's process, on its event loop."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self.late_weights = LateWeights()  # for the actors that the weight group did not reach
        self._indices = itertools.count()
        self._serving: list[ActorHandle] = []
        self._dealing: LeastLoaded[ActorHandle] = LeastLoaded()
        self._oldest: int | None = None  # cached for `version`, which is read for every group
        self._not_serving: set[ActorHandle] = set()  # starting or draining
        self._newest: WeightUpdate | None = None
        self._deaths: list[VolleyError] = []
        self._restarts = Restarts(config.actors.max_replacements)
        self._replacing: set[asyncio.Task[None]] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._gone: WeightsGone | None = None  # set while no actor can start because the newest weights are lost
        self._changed = asyncio.Condition()  # notified when any of these changes: serving, newest, gone, failure
        self._scaling = asyncio.Lock()
        self._awake = asyncio.Event()  # cleared while the learner has the actors' devices
        self._awake.set()
        self._starting = 0

    @classmethod
    async def start(cls, config: ActorConfig) -> "ActorPool":
        """Start ``config.actors.count`` actors and wait until all serve. Ray must be initialised.

        Raises:
            JobError: the model does not load, or vLLM does not have an engine option.
            DeadlineExceeded: an actor was not ready within ``actors.start_deadline_s``.
            WorkerDied: an actor ended while starting.
        """
        pool = cls(config)
        try:
            await pool.scale(config.actors.count)
        except BaseException:
            await pool.stop()
            raise
        return pool

    @property
    def count(self) -> int:
        """Number of serving actors."""
        return len(self._serving)

    @property
    def version(self) -> int:
        """The oldest version that a serving actor has; without serving actors, the newest version received."""
        if self._oldest is None:
            newest = self._newest.version if self._newest is not None else 0
            self._oldest = min((actor.version for actor in self._serving), default=newest)
        return self._oldest

    @property
    def infos(self) -> tuple[ActorInfo, ...]:
        """The serving actors."""
        return tuple(actor.info for actor in self._serving if actor.info is not None)

    @property
    def deaths(self) -> tuple[VolleyError, ...]:
        """The unexpected deaths of actors, in order."""
        return tuple(self._deaths)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All actors, by index."""
        known = {actor: actor.view("serving") for actor in self._serving}
        known |= {actor: actor.view("draining" if actor.info else "starting") for actor in self._not_serving}
        return tuple(known[actor] for actor in sorted(known, key=lambda actor: actor.index))

    async def generate(self, request: GenerateRequest) -> tuple[Ref[Group], GroupMeta]:
        """Generate a group on the actor with the fewest samples in flight; the group stays in the object store.

        If that actor dies, another one generates the group again. Without any actor, waits for one.

        Raises:
            JobError: the prompt is empty, too long, or contains a token that the model does not have.
            WorkerDied, DeadlineExceeded: an actor ended or took too long, and may not be replaced.
            WeightsGone: no actor is left, and none can get the latest weights.
        """
        while True:
            actor = await self._least_loaded()
            if actor.info is not None:
                actor.info.check(request)
            try:
                return await actor.generate(request)
            except (WorkerDied, DeadlineExceeded) as end:
                self._lost(actor, end)
            finally:
                self._dealing.lighter(actor)

    async def episodes(
        self, request: EpisodesRequest, run: Callable[[OpenedSessions], Awaitable[_T]]
    ) -> tuple[_T, Ref[Group], GroupMeta, tuple[EpisodeReport, ...]]:
        """Open sessions on the actor with the fewest samples in flight, and await ``run`` with them.

        Returns what ``run`` returned and what the sessions recorded. If the actor dies meanwhile, ``run`` is awaited
        again with sessions of another one. Without any actor, waits for one.

        Raises:
            WorkerDied, DeadlineExceeded: an actor ended or took too long, and may not be replaced.
            WeightsGone: no actor is left, and none can get the latest weights.
        """
        while True:
            actor = await self._least_loaded()
            try:
                with actor.in_flight(request.n):
                    try:
                        opened = await actor.open_sessions(request)
                    except (WorkerDied, DeadlineExceeded) as end:
                        self._lost(actor, end)
                        continue
                    try:
                        result = await run(opened)
                    except BaseException:
                        actor.drop_sessions(request, opened)
                        raise
                    try:
                        return (result, *await actor.close_sessions(request, opened))
                    except (WorkerDied, DeadlineExceeded) as end:
                        self._lost(actor, end)
            finally:
                self._dealing.lighter(actor)

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport:
        """Pass ``update`` to all actors while they generate. Each switches as soon as it has the weights.

        Actors that sleep wake up with it. If the learner lends it they sleep on: call `wake` once the learner sleeps.

        Raises:
            WorkerDied, DeadlineExceeded: an actor ended or took too long, and may not be replaced.
        """
        started = time.perf_counter()
        self._newest, self._oldest = update.taken_back() if update.lent else update, None
        self.late_weights.forget()
        if self._gone is not None:
            self._gone = None
            await self._notify()  # replacements wait for it
        updates = await _all(self._update(actor, update) for actor in self._serving)
        if not self._awake.is_set() and not update.lent:
            await self.wake()
        received = tuple(done for done in updates if done is not None)
        return BroadcastReport(update.version, received, time.perf_counter() - started)

    async def sleep(self) -> None:
        """Leave the devices to the learner until the next `broadcast` or `wake`.

        Actors that are starting finish that before; others start afterwards. Samples under way, and new ones, wait.

        Raises:
            WorkerDied, DeadlineExceeded: an actor ended or took too long, and may not be replaced.
        """
        self._awake.clear()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._starting)
        await _all(self._result(actor, actor.sleep) for actor in self._with_engines())

    async def wake(self) -> None:
        """Let all actors generate again, with the weights they had. Raises as `sleep`."""
        await _all(self._result(actor, actor.wake) for actor in self._with_engines())
        self._awake.set()

    @property
    def weight_group_members(self) -> tuple[tuple[str, int], ...]:
        """The serving actors by name, each with the number of engine processes that hold its model."""
        return tuple((info.name, info.model_processes) for info in self.infos)

    async def join_weight_group(self, terms: WeightGroupTerms) -> None:
        """Let the group's members join in the background. Failures are logged; the group then ends at its deadline."""
        actors = [actor for actor in self._serving if actor.name in dict(terms.members)]
        joining = (actor.join_weight_group(terms) for actor in actors)
        for actor, error in zip(actors, await asyncio.gather(*joining, return_exceptions=True), strict=True):
            if error is not None:
                log.warning("weight group %s: %s: %s", terms.name, actor.name, error)

    async def probe(self, request: GenerateRequest) -> dict[str, Ref[Group]]:
        """By actor, a group that this very actor generated.

        Raises:
            WorkerDied, DeadlineExceeded: an actor died or took too long, and may not be replaced.
        """
        actors = list(self._serving)
        generated = await _all(self._result(actor, partial(actor.generate, request)) for actor in actors)
        return {actor.name: group[0] for actor, group in zip(actors, generated, strict=True) if group is not None}

    async def served_weights(self) -> dict[str, NDArray[np.uint8]]:
        """By actor, the weights its engine computes with, as a safetensors file with checkpoint names."""
        actors = list(self._serving)
        files = await _all(actor.served_weights() for actor in actors)
        return {actor.name: file for actor, file in zip(actors, files, strict=True)}

    async def scale(self, count: int) -> None:
        """Change the number of serving actors; returns when ``count`` serve. Zero pauses generation. New actors start
        with the newest weights while the others serve; surplus actors finish their groups first.

        Raises:
            JobError, DeadlineExceeded, WorkerDied: an actor did not start; the others keep serving.
        """
        async with self._scaling:
            await asyncio.gather(*self._replacing)
            surplus = sorted(self._serving, key=lambda actor: actor.samples)[: max(0, self.count - count)]
            await _all(self._retire(actor) for actor in surplus)
            await asyncio.gather(*self._replacing)  # of actors that died while the surplus finished its groups
            await _all(self._start_one() for _ in range(count - self.count))

    async def stop(self) -> None:
        """End all actors and their engines."""
        for task in self._replacing | self._watching:
            task.cancel()
        actors = [*self._serving, *self._not_serving]
        for actor in [*self._serving]:
            self._remove(actor)
        await asyncio.gather(*(actor.stop() for actor in actors))

    async def _least_loaded(self) -> ActorHandle:
        async with self._changed:
            await self._changed.wait_for(lambda: self._serving or self._failure or self._gone)
            if self._failure is not None:
                raise self._failure
            if not self._serving and self._gone is not None:
                raise self._gone
            return self._dealing.first()

    async def _update(self, actor: ActorHandle, update: WeightUpdate) -> ActorUpdate | None:
        try:
            return await self._result(actor, partial(actor.update, update))
        finally:
            self._oldest = None

    def _with_engines(self) -> list[ActorHandle]:
        """The actors that may generate, while none is starting: those serving and those that finish their groups."""
        return [*self._serving, *(actor for actor in self._not_serving if actor.info is not None)]

    async def _result(self, actor: ActorHandle, call: Callable[[], Awaitable[_T]]) -> _T | None:
        """What ``call`` of ``actor`` returns; None if the actor died, and is replaced."""
        try:
            return await call()
        except (WorkerDied, DeadlineExceeded) as end:
            self._lost(actor, end)
            return None

    async def _start_one(self) -> None:
        await self._awake.wait()
        actor = ActorHandle(self._config, next(self._indices), self.late_weights)
        self._not_serving.add(actor)
        self._starting += 1
        try:
            await actor.start()
            await self._bring_up_to_date(actor)
            self._serving.append(actor)
            self._serving.sort(key=lambda actor: actor.index)
            self._dealing.add(actor)
            self._oldest = None
        except BaseException:
            actor.kill()
            raise
        finally:
            self._not_serving.discard(actor)
            self._starting -= 1
            await self._notify()
        _spawn(self._watch(actor), self._watching)

    async def _bring_up_to_date(self, actor: ActorHandle) -> None:
        # A newer version may be published during an update, so look again after each.
        while (newest := self._newest) is not None and actor.version != newest.version:
            try:
                await actor.update(newest)
            except WeightsGone:
                if self._newest is newest:
                    raise

    async def _watch(self, actor: ActorHandle) -> None:
        """Treat a hung actor as dead, so that its pending calls fail."""
        while actor in self._serving:
            try:
                await actor.ping(self._config.actors.hang_deadline_s)
            except (WorkerDied, DeadlineExceeded) as end:
                self._replace_dead(actor, end)
            await asyncio.sleep(PING_EVERY)

    def _remove(self, actor: ActorHandle) -> None:
        self._serving.remove(actor)
        self._dealing.remove(actor)
        self._oldest = None

    async def _retire(self, actor: ActorHandle) -> None:
        self._remove(actor)
        self._not_serving.add(actor)
        await actor.idle.wait()  # groups and updates in flight have deadlines of their own
        await actor.stop()
        self._not_serving.discard(actor)

    def _lost(self, actor: ActorHandle, end: VolleyError) -> None:
        """Replace a dead or hung actor; raises the pool's failure if it may not be replaced."""
        self._replace_dead(actor, end)
        if self._failure is not None:
            raise self._failure

    def _replace_dead(self, actor: ActorHandle, end: VolleyError) -> None:
        if actor not in self._serving:
            return
        self._remove(actor)
        actor.kill()
        if self._count_death(end):
            _spawn(self._start_replacement(), self._replacing)

    def _count_death(self, end: VolleyError) -> bool:
        self._deaths.append(end)
        if not self._restarts.allow():
            self._failure = end
        return self._failure is None

    async def _start_replacement(self) -> None:
        """Start an actor; if that fails for good, set the failure that every waiting group then raises."""
        try:
            while True:
                try:
                    return await self._start_one()
                except (WorkerDied, DeadlineExceeded) as end:
                    if not self._count_death(end):
                        return None
                except WeightsGone as gone:
                    await self._wait_for_other_weights(gone)
        except Exception as error:  # noqa: BLE001 - nothing awaits this task: the calls that wait for an actor raise it
            self._failure = error
        finally:
            await self._notify()

    async def _wait_for_other_weights(self, gone: WeightsGone) -> None:
        """Wait until a version after the lost one is published."""
        lost = self._newest
        async with self._changed:
            self._gone = gone
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._newest is not lost)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await all and return the results in order; the first error cancels the rest and is raised, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
