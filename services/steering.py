"""Steers a live rl run toward what is desired of it, and says how it stands.

desired.json ─┐                       ┌─> coordinator (paused, stopped, objective, learning rate, lag)
              ├─ the newer ─> Steering ┼─> actor pool     ┐ a task each, so that a slow start
Redis ────────┘                       └─> reward pool    ┘ keeps nothing else waiting
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal

from actors.pool import ActorPool
from learner.group import LearnerGroup
from reward_servers.pool import RewardPool
from services.autoscale import LOOKS, Look, next_count
from services.coordinator import Coordinator
from services.desired import check_desired, read_desired, write_desired
from services.recorder import RunRecorder
from services.run_folder import RunFolder
from services.start import cancel_all, first_error
from services.state import Desired, WorkerView
from services.store import Store
from volley.errors import HostError, JobError, VolleyError
from volley.job import RLJob
from volley.records import WorkerInfo

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
RETRY_SECONDS = 15.0
LAST_EVENTS_SECONDS = 10.0
OVERDUE_SECONDS = 60.0  # a wait that lasts longer is an event


async def newest_desired(folder: RunFolder, store: Store) -> Desired:
    """What is desired by the newer of run folder and Redis, copied to the other. Redis may be away.

    Raises:
        JobError: the folder's file does not say it properly.
    """
    here = read_desired(folder)
    try:
        there = await store.desired(folder.run_id)
        if here.revision > there.revision:
            await store.put_desired(folder.run_id, here)
    except HostError:
        return here
    if there.revision > here.revision:
        with contextlib.suppress(OSError):  # a full disk: a copy is no reason to miss a stop
            write_desired(folder, there)
        return there
    return here


class Steering:
    """Owned by the run's event loop.

    Args:
        desired: as it stands now.
    """

    def __init__(
        self,
        job: RLJob,
        folder: RunFolder,
        store: Store,
        recorder: RunRecorder,
        *,
        actors: ActorPool,
        rewards: RewardPool,
        desired: Desired,
    ) -> None:
        self._job, self._folder, self._store, self._recorder = job, folder, store, recorder
        self._actors, self._rewards = actors, rewards
        self.desired = desired
        self._coordinator: Coordinator | None = None
        self._learner: LearnerGroup | None = None
        self._auto_actors = job.actors.count
        self._looks: deque[Look] = deque(maxlen=LOOKS)
        self._refused: int | None = None  # revision that could not be
        self._events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._told = {"actor": 0, "reward_worker": 0}
        self._targets = {"actors": asyncio.Event(), "reward_workers": asyncio.Event()}
        self._troubles: dict[str, str] = {}

    def steer(self, coordinator: Coordinator, learner: LearnerGroup) -> None:
        """From now on ``coordinator``, which began with `desired`, over ``learner``."""
        self._coordinator, self._learner = coordinator, learner

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For the length of the block: look for changes and bring them about."""
        loops = (
            self._look(),
            self._write_events(),
            self._keep("actors", lambda: self.actors_wanted, self._actors.scale),
            self._keep("reward_workers", lambda: self.reward_workers_wanted, self._rewards.scale),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                steering = [tasks.create_task(loop) for loop in loops]
                try:
                    yield
                finally:
                    await cancel_all(steering)
                    await self._write_the_rest()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    @property
    def actors_wanted(self) -> int:
        return self._auto_actors if self.desired.actors is None else self.desired.actors

    @property
    def reward_workers_wanted(self) -> int:
        wanted = self.desired.reward_workers
        return self._job.reward_workers.count if wanted is None else wanted

    def view(self) -> Mapping[str, Any]:
        """Fields of `services.state.Observed`."""
        coordinator = self._coordinator
        if coordinator is None:
            return {}
        held = coordinator.held or self._recorder.room.problem
        return {
            "state": "stopping" if self.desired.stopped else "paused" if held else "running",
            "problem": held or "; ".join(self._troubles.values()),
            "step": coordinator.version,
            "steps": self._job.steps,
            "version": self._actors.version,
            "revision": self.desired.revision,
            "actors": self._actors.count,
            "actors_wanted": self.actors_wanted,
            "reward_workers": self._rewards.count,
            "reward_workers_wanted": self.reward_workers_wanted,
            "sandbox": self._rewards.sandbox,
            "learner_ranks": self._job.learner.ranks,
            "groups": coordinator.groups(),
            "waiting": coordinator.waits.words(),
            "workers": self._workers(),
        }

    def _workers(self) -> tuple[WorkerView, ...]:
        ranks = self._learner.workers() if self._learner else ()
        return (
            *(_view("actor", each) for each in self._actors.workers()),
            *(_view("reward_worker", each) for each in self._rewards.workers()),
            *(_view("learner_rank", each) for each in ranks),
        )

    async def _look(self) -> None:
        """Take up changes as they come. A change that can not be is reported, and what held before goes on."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                desired = await newest_desired(self._folder, self._store)
                if desired.revision not in (self.desired.revision, self._refused):
                    await self._take_up(desired)
                    self._troubles.pop("desired", None)
            except (JobError, ValueError) as problem:
                self._trouble("desired", f"what is desired can not be: {problem}")
            self._watch()
            self._autoscale()

    def _autoscale(self) -> None:
        """Follow the learner's hunger, where the job allows it and the user wants no number of their own."""
        coordinator, spec = self._coordinator, self._job.actors
        if spec.most is None or coordinator is None or self.desired.actors is not None or coordinator.held:
            self._looks.clear()
            return
        groups = coordinator.groups()
        self._looks.append(Look(coordinator.starving, groups["generating"], groups["scoring"]))
        wanted = next_count(self._auto_actors, self._looks, low=spec.count, high=max(spec.count, spec.most))
        if wanted != self._auto_actors:
            self._auto_actors = wanted
            self._looks.clear()
            self._targets["actors"].set()

    async def _take_up(self, desired: Desired) -> None:
        """Raises `JobError`, once, for what can not be."""
        self._refused = desired.revision
        check_desired(self._job, desired)
        counts = self.actors_wanted, self.reward_workers_wanted
        if self._coordinator is not None:
            await self._coordinator.want(desired)
        before, self.desired, self._refused = self.desired, desired, None
        changes = {key: value for key, value in desired.model_dump().items() if value != before.model_dump()[key]}
        self._tell("desired_changed", **changes)
        for changed, old, new in zip(
            self._targets.values(), counts, (self.actors_wanted, self.reward_workers_wanted), strict=True
        ):
            if old != new:
                changed.set()

    async def _keep(self, role: str, wanted: Callable[[], int], scale: Callable[[int], Awaitable[None]]) -> None:
        """Bring the role to its wanted count at every change; try again while that fails."""
        changed = self._targets[role]
        while True:
            await changed.wait()
            changed.clear()
            count = wanted()
            try:
                await scale(count)
                self._troubles.pop(role, None)
                self._tell("scaled", role=role, count=count)
            except VolleyError as problem:
                self._trouble(role, f"{role} can not be scaled to {count}: {problem}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await changed.wait()
                changed.set()

    def _watch(self) -> None:
        """Events for deaths, and for long waits unless the run is held on purpose."""
        for role, pool in (("actor", self._actors), ("reward_worker", self._rewards)):
            for death in pool.deaths[self._told[role] :]:
                self._told[role] += 1
                self._tell(f"{role}_died", problem=str(death))
        if self._coordinator is not None and not self._coordinator.held:
            for words in self._coordinator.waits.overdue(OVERDUE_SECONDS):
                self._tell("waiting", problem=words)

    def _trouble(self, key: str, text: str) -> None:
        """Say it once: in an event, and in the run's state until it is over."""
        if self._troubles.get(key) != text:
            self._troubles[key] = text
            self._tell("trouble", problem=text)

    def _tell(self, kind: str, **details: Any) -> None:
        """An event, written by a task of its own: a full disk must not keep a change from being taken up."""
        self._events.put_nowait((kind, details))

    async def _write_events(self) -> None:
        while True:
            kind, details = await self._events.get()
            await self._recorder.event(kind, **details)

    async def _write_the_rest(self) -> None:
        self._watch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_SECONDS):
                while not self._events.empty():
                    kind, details = self._events.get_nowait()
                    await self._recorder.event(kind, **details)


def _view(role: Literal["actor", "reward_worker", "learner_rank"], of: WorkerInfo) -> WorkerView:
    return WorkerView(role=role, name=of.name, state=of.state, pid=of.pid, version=of.version, busy=of.busy)
