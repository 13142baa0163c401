"""The actors of one run, as the coordinator sees them: dealt groups, given weights, replaced when they die, scaled.

starting ──newest weights──> serving ──scale down──> draining ──> stopped
                                │
                                └─ dies: its groups are generated again elsewhere, a replacement starts
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from ray import ObjectRef

from actors.config import ActorConfig, ActorInfo, ActorUpdate, BroadcastReport, GenerateRequest
from actors.dealing import LeastLaden
from actors.member import Member
from volley.errors import DeadlineExceeded, JobError, VolleyError, WeightsGone, WorkerDied
from volley.records import GroupMeta, WeightUpdate, WorkerInfo
from volley.restarts import Restarts
from volley.weight_group import WeightGroupTerms

log = logging.getLogger(__name__)
_T = TypeVar("_T")
PING_EVERY = 5.0  # seconds


class ActorPool:
    """Lives in the coordinator's process, on its event loop."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._indices = itertools.count()
        self._serving: list[Member] = []
        self._dealing: LeastLaden[Member] = LeastLaden()
        self._oldest: int | None = None  # version of those that serve; asked at every group, so it is kept
        self._aside: set[Member] = set()  # starting or draining
        self._newest: WeightUpdate | None = None
        self._deaths: list[VolleyError] = []
        self._restarts = Restarts(config.max_replacements)
        self._replacing: set[asyncio.Task[None]] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._gone: WeightsGone | None = None  # no actor can start before the next version
        self._changed = asyncio.Condition()  # an actor serves, weights came or are gone, or the pool has failed
        self._scaling = asyncio.Lock()

    @classmethod
    async def start(cls, config: ActorConfig) -> "ActorPool":
        """Start ``config.actors.count`` actors; returns when all of them serve. Ray must be initialised.

        Raises:
            JobError: the model does not load, or an engine option is not vLLM's.
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
        """Actors that serve."""
        return len(self._serving)

    @property
    def version(self) -> int:
        """The oldest version any serving actor serves; with none, the newest one received."""
        if self._oldest is None:
            newest = self._newest.version if self._newest is not None else 0
            self._oldest = min((member.version for member in self._serving), default=newest)
        return self._oldest

    @property
    def infos(self) -> tuple[ActorInfo, ...]:
        """What the serving actors are."""
        return tuple(member.info for member in self._serving if member.info is not None)

    @property
    def deaths(self) -> tuple[VolleyError, ...]:
        """How actors ended that were not asked to, in order."""
        return tuple(self._deaths)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Every actor, by index."""
        known = {member: member.view("serving") for member in self._serving}
        known |= {member: member.view("draining" if member.info else "starting") for member in self._aside}
        return tuple(known[member] for member in sorted(known, key=lambda member: member.index))

    async def generate(self, request: GenerateRequest) -> tuple[ObjectRef, GroupMeta]:
        """One group from the actor with the fewest samples in flight; the group itself stays in the object store.

        When that actor dies, the group is generated again by another one. With no actor it waits for one.

        Raises:
            JobError: the prompt is empty, leaves no room for a sample, or holds a token the model has not.
            WorkerDied, DeadlineExceeded: an actor ended, or took too long, and may not be replaced.
            WeightsGone: no actor is left, and none can have the weights published last.
        """
        while True:
            member = await self._least_loaded()
            if member.info is not None:
                _check_prompt(request, member.info)
            try:
                return await member.generate(request)
            except (WorkerDied, DeadlineExceeded) as end:
                self._lost(member, end)
            finally:
                self._dealing.lighter(member)

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport:
        """Pass ``update`` to every actor while they generate; each takes it as soon as it has it, whatever others do.

        Raises:
            WorkerDied, DeadlineExceeded: an actor ended, or took too long, and may not be replaced.
        """
        started = time.perf_counter()
        self._newest, self._oldest = update, None
        if self._gone is not None:
            self._gone = None
            await self._notify()  # replacements wait for it
        updates = await _all(self._update(member, update) for member in self._serving)
        received = tuple(done for done in updates if done is not None)
        return BroadcastReport(update.version, received, time.perf_counter() - started)

    @property
    def weight_group_members(self) -> tuple[tuple[str, int], ...]:
        """The serving actors by name, with the number of processes that hold its model."""
        return tuple((info.name, info.model_processes) for info in self.infos)

    async def join_weight_group(self, terms: WeightGroupTerms) -> None:
        """Have its members join, in the background; one that can not is logged, and the group ends at its deadline."""
        members = [member for member in self._serving if member.name in dict(terms.members)]
        joining = (member.join_weight_group(terms) for member in members)
        for member, end in zip(members, await asyncio.gather(*joining, return_exceptions=True), strict=True):
            if end is not None:
                log.warning("weight group %s: %s: %s", terms.name, member.name, end)

    async def served_weights(self) -> dict[str, NDArray[np.uint8]]:
        """By actor, the weights its engine computes with: a safetensors file in checkpoint names."""
        members = list(self._serving)
        files = await _all(member.served_weights() for member in members)
        return {member.name: file for member, file in zip(members, files, strict=True)}

    async def scale(self, count: int) -> None:
        """Serve with ``count`` actors; returns when it is so. New ones start beside the others with the newest weights,
        surplus ones finish their groups first. Zero pauses generation.

        Raises:
            JobError, DeadlineExceeded, WorkerDied: an actor did not start; the others serve on.
        """
        async with self._scaling:
            await asyncio.gather(*self._replacing)
            surplus = sorted(self._serving, key=lambda member: member.samples)[: max(0, self.count - count)]
            await _all(self._retire(member) for member in surplus)
            await _all(self._enlist() for _ in range(count - self.count))

    async def stop(self) -> None:
        """End every actor and its engine."""
        for task in self._replacing | self._watching:
            task.cancel()
        members = [*self._serving, *self._aside]
        for member in [*self._serving]:
            self._leave(member)
        await asyncio.gather(*(member.stop() for member in members))

    async def _least_loaded(self) -> Member:
        async with self._changed:
            await self._changed.wait_for(lambda: self._serving or self._failure or self._gone)
            if self._failure is not None:
                raise self._failure
            if not self._serving and self._gone is not None:
                raise self._gone
            return self._dealing.first()

    async def _update(self, member: Member, update: WeightUpdate) -> ActorUpdate | None:
        try:
            return await member.update(update)
        except (WorkerDied, DeadlineExceeded) as end:
            self._lost(member, end)
            return None
        finally:
            self._oldest = None

    async def _enlist(self) -> None:
        member = Member(self._config, next(self._indices))
        self._aside.add(member)
        try:
            await member.start()
            await self._bring_up_to_date(member)
            self._serving.append(member)
            self._serving.sort(key=lambda member: member.index)
            self._dealing.add(member)
            self._oldest = None
        except BaseException:
            member.kill()
            raise
        finally:
            self._aside.discard(member)
        _spawn(self._watch(member), self._watching)
        await self._notify()

    async def _bring_up_to_date(self, member: Member) -> None:
        while (newest := self._newest) is not None and member.version != newest.version:  # one more may have come
            try:
                await member.update(newest)
            except WeightsGone:
                if self._newest is newest:
                    raise

    async def _watch(self, member: Member) -> None:
        """A hang is worse than a death: make one of it, which every call on the actor then hears of."""
        while member in self._serving:
            try:
                await member.ping(self._config.hang_deadline_s)
            except (WorkerDied, DeadlineExceeded) as end:
                self._bury(member, end)
            await asyncio.sleep(PING_EVERY)

    def _leave(self, member: Member) -> None:
        self._serving.remove(member)
        self._dealing.remove(member)
        self._oldest = None

    async def _retire(self, member: Member) -> None:
        self._leave(member)
        self._aside.add(member)
        await member.idle.wait()  # every group in flight has its own deadline
        await member.stop()
        self._aside.discard(member)

    def _lost(self, member: Member, end: VolleyError) -> None:
        """Put a dead or stuck actor out of the pool; raises why, if it may not be replaced."""
        self._bury(member, end)
        if self._failure is not None:
            raise self._failure

    def _bury(self, member: Member, end: VolleyError) -> None:
        if member not in self._serving:
            return
        self._leave(member)
        member.kill()
        if self._count_death(end):
            _spawn(self._replace(), self._replacing)

    def _count_death(self, end: VolleyError) -> bool:
        self._deaths.append(end)
        if not self._restarts.allow():
            self._failure = end
        return self._failure is None

    async def _replace(self) -> None:
        """Another actor, or the failure that every waiting group then raises."""
        try:
            while True:
                try:
                    return await self._enlist()
                except (WorkerDied, DeadlineExceeded) as end:
                    if not self._count_death(end):
                        return None
                except WeightsGone as gone:
                    await self._other_weights(gone)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task: whoever waits for an actor raises it
            self._failure = error
        finally:
            await self._notify()

    async def _other_weights(self, gone: WeightsGone) -> None:
        """Returns when weights are published that are not those which are gone."""
        lacking = self._newest
        async with self._changed:
            self._gone = gone
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._newest is not lacking)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _check_prompt(request: GenerateRequest, info: ActorInfo) -> None:
    length = len(request.prompt_p)
    if not 0 < length < info.max_model_len:
        raise JobError(
            f"prompt {request.prompt_id!r} has {length} tokens and the model takes 1 to {info.max_model_len - 1}: "
            "change it, or drop it from the data"
        )
    if (token := int(request.prompt_p.max())) >= info.vocab_size:
        raise JobError(
            f"prompt {request.prompt_id!r} holds token {token} and the model has {info.vocab_size}: "
            "the tokenizer in model.path is another model's"
        )


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order; the first error stops the rest and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
