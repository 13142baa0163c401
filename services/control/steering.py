"""Steers a live rl run toward its desired state, and describes its observed state.

desired.json ─┐                        ┌─> coordinator (paused, stopped, objective, learning rate, lag)
              ├─ combined ──> Steering ┼─> actor pool          ┐
Redis ────────┘                        ├─> reward pool         ├ one task each, so that
                                       └─> environment pool    ┘ a slow start delays nothing else
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, Protocol

from actors.pool import ActorPool
from learner.pool import LearnerPool
from services.control.autoscale import WINDOW, Look, next_count
from services.control.heartbeat import ObservedUpdate
from services.coordinator.loop import Coordinator
from services.recording.recorder import RunRecorder
from services.store.desired import DesiredCopies, check_desired
from services.store.folder import RunFolder
from services.store.redis import Store
from services.tasks import cancel_all, first_error
from volley.errors import JobError, VolleyError
from volley.job import RLJob
from volley.objectives import check_objective, resolve
from volley.records import WorkerInfo
from volley.state import Desired, WorkerView

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
RETRY_SECONDS = 15.0
LAST_EVENTS_SECONDS = 10.0
OVERDUE_SECONDS = 60.0  # a longer wait is reported as an event


Role = Literal["actor", "reward_worker", "environment_worker", "learner_rank"]


class Mortal(Protocol):
    """A role whose processes may die."""

    @property
    def deaths(self) -> tuple[VolleyError, ...]: ...


class Workers(Mortal, Protocol):
    """A role whose number of processes may change: `environments.pool.EnvironmentPool`."""

    @property
    def count(self) -> int: ...

    def workers(self) -> tuple[WorkerInfo, ...]: ...

    async def scale(self, count: int) -> None: ...


class Scorers(Workers, Protocol):
    """`reward_servers.pool.RewardPool`."""

    @property
    def sandbox(self) -> str: ...


class Steering:
    """Applies each newer desired state to the run. Used from the run's event loop only.

    Args:
        desired: the desired state that the run starts with.
        environments: the environment workers; without a program, a stand-in with none.
    """

    def __init__(
        self,
        job: RLJob,
        folder: RunFolder,
        store: Store,
        recorder: RunRecorder,
        *,
        actors: ActorPool,
        rewards: Scorers,
        environments: Workers,
        desired: Desired,
    ) -> None:
        self._job, self._folder, self._store, self._recorder = job, folder, store, recorder
        self._actors, self._rewards, self._environments = actors, rewards, environments
        self.desired, self._copies = desired, DesiredCopies(folder, store, desired)
        self._coordinator: Coordinator | None = None
        self._learner: LearnerPool | None = None
        self._auto_actors = job.actors.count
        self._looks: deque[Look] = deque(maxlen=WINDOW)
        self._events: asyncio.Queue[tuple[str, dict[str, object]]] = asyncio.Queue()
        self._deaths_reported = {"actor": 0, "reward_worker": 0, "environment_worker": 0}
        self._count_changed = {role: asyncio.Event() for role in ("actors", "reward_workers", "environment_workers")}
        self._troubles: dict[str, str] = {}

    def steer(self, coordinator: Coordinator, learner: LearnerPool) -> None:
        """Steer ``coordinator``, which was started with `desired`, and its ``learner`` from now on."""
        self._coordinator, self._learner = coordinator, learner

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """During the block, look for changes and apply them."""
        loops = (
            self._poll(),
            self._write_events(),
            self._follow_count("actors", lambda: self.actors_wanted, self._actors.scale),
            self._follow_count("reward_workers", lambda: self.reward_workers_wanted, self._rewards.scale),
            self._follow_count(
                "environment_workers", lambda: self.environment_workers_wanted, self._environments.scale
            ),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                steering = [tasks.create_task(loop) for loop in loops]
                try:
                    yield
                finally:
                    await cancel_all(steering)
                    await self._write_last_events()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    @property
    def actors_wanted(self) -> int:
        return self._auto_actors if self.desired.actors is None else self.desired.actors

    @property
    def reward_workers_wanted(self) -> int:
        wanted = self.desired.reward_workers
        if self._job.scorer is None:
            return 0
        return self._job.reward_workers.count if wanted is None else wanted

    @property
    def environment_workers_wanted(self) -> int:
        wanted = self.desired.environment_workers
        if self._job.rollout is None:
            return 0
        return self._job.environment_workers.count if wanted is None else wanted

    def _counts(self) -> tuple[int, int, int]:
        return self.actors_wanted, self.reward_workers_wanted, self.environment_workers_wanted

    def view(self) -> ObservedUpdate:
        """The run's observed state; empty before `steer`."""
        coordinator = self._coordinator
        if coordinator is None:
            return {}
        pause_reason = coordinator.pause_reason or self._recorder.disk.problem
        return {
            "state": "stopping" if self.desired.stopped else "paused" if pause_reason else "running",
            "problem": pause_reason or "; ".join(self._troubles.values()),
            "step": coordinator.version,
            "steps": self._job.steps,
            "version": self._actors.version,
            "revision": self.desired.revision,
            "actors": self._actors.count,
            "actors_wanted": self.actors_wanted,
            "reward_workers": self._rewards.count,
            "reward_workers_wanted": self.reward_workers_wanted,
            "environment_workers": self._environments.count,
            "environment_workers_wanted": self.environment_workers_wanted,
            "sandbox": self._rewards.sandbox,
            "learner_ranks": self._job.learner.ranks,
            "groups": coordinator.groups(),
            "waiting": coordinator.waits.sentences(),
            "workers": self._workers(),
        }

    def _workers(self) -> tuple[WorkerView, ...]:
        ranks = self._learner.workers() if self._learner else ()
        return (
            *(_worker_view("actor", each) for each in self._actors.workers()),
            *(_worker_view("reward_worker", each) for each in self._rewards.workers()),
            *(_worker_view("environment_worker", each) for each in self._environments.workers()),
            *(_worker_view("learner_rank", each) for each in ranks),
        )

    async def _poll(self) -> None:
        """Apply changes as they arrive. An impossible one is reported, and the previous state stays in force."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                desired = await self._copies.newest()
                if desired != self.desired:
                    await self._apply(desired)
                self._troubles.pop("desired", None)
            except (JobError, ValueError) as problem:
                self._report_trouble("desired", f"the desired state cannot be applied: {problem}")
            self._report_deaths_and_waits()
            self._autoscale()

    def _autoscale(self) -> None:
        """Adapt the number of actors, if the job allows it and the user has not set one."""
        coordinator, spec = self._coordinator, self._job.actors
        if spec.max_count is None or coordinator is None or self.desired.actors is not None or coordinator.pause_reason:
            self._looks.clear()
            return
        groups = coordinator.groups()
        self._looks.append(Look(coordinator.starving, groups["generating"], groups["scoring"]))
        wanted = next_count(self._auto_actors, self._looks, low=spec.count, high=max(spec.count, spec.max_count))
        if wanted != self._auto_actors:
            self._auto_actors = wanted
            self._looks.clear()
            self._count_changed["actors"].set()

    async def _apply(self, desired: Desired) -> None:
        """Apply a new desired state. Raises `JobError` or `ValueError` if it is impossible; then nothing changes."""
        check_desired(self._job, desired)
        coordinator, before, counts = self._coordinator, self.desired, self._counts()
        if coordinator is not None and desired.objective != before.objective:
            objective = resolve(self._job.objective, self._job.schedule, coordinator.version, desired.objective)
            check_objective(objective, self._job.sampling.n)
            self._record("objective_changed", step=coordinator.version, objective=objective.model_dump())
        self.desired = desired  # before the next await, so that a coordinator that is made meanwhile has it
        if coordinator is not None:
            await coordinator.apply(desired)
        changes = {key: value for key, value in desired.model_dump().items() if value != before.model_dump()[key]}
        self._record("desired_changed", **changes)
        for changed, old, new in zip(self._count_changed.values(), counts, self._counts(), strict=True):
            if old != new:
                changed.set()

    async def _follow_count(
        self, role: str, wanted: Callable[[], int], scale: Callable[[int], Awaitable[None]]
    ) -> None:
        """Scale the role to its wanted count after every change, and try again while that fails."""
        changed = self._count_changed[role]
        while True:
            await changed.wait()
            changed.clear()
            count = wanted()
            try:
                await scale(count)
                self._troubles.pop(role, None)
                self._record("scaled", role=role, count=count)
            except VolleyError as problem:
                self._report_trouble(role, f"{role} cannot be scaled to {count}: {problem}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await changed.wait()
                changed.set()

    def _report_deaths_and_waits(self) -> None:
        """Record an event for each death, and for each long wait unless the run is paused."""
        pools: tuple[tuple[str, Mortal], ...] = (
            ("actor", self._actors),
            ("reward_worker", self._rewards),
            ("environment_worker", self._environments),
        )
        for role, pool in pools:
            for death in pool.deaths[self._deaths_reported[role] :]:
                self._deaths_reported[role] += 1
                self._record(f"{role}_died", problem=str(death))
        if self._coordinator is not None and not self._coordinator.pause_reason:
            for sentence in self._coordinator.waits.overdue(OVERDUE_SECONDS):
                self._record("waiting", problem=sentence)

    def _report_trouble(self, key: str, problem: str) -> None:
        """Record a problem as one event, and show it in the run's state until ``key`` is removed."""
        if self._troubles.get(key) != problem:
            self._troubles[key] = problem
            self._record("trouble", problem=problem)

    def _record(self, kind: str, **details: object) -> None:
        """Queue an event. Another task writes it, so that a full disk does not delay the next change."""
        self._events.put_nowait((kind, details))

    async def _write_events(self) -> None:
        while True:
            kind, details = await self._events.get()
            await self._recorder.event(kind, **details)

    async def _write_last_events(self) -> None:
        self._report_deaths_and_waits()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_SECONDS):
                while not self._events.empty():
                    kind, details = self._events.get_nowait()
                    await self._recorder.event(kind, **details)


def _worker_view(role: Role, info: WorkerInfo) -> WorkerView:
    return WorkerView(role=role, name=info.name, state=info.state, pid=info.pid, version=info.version, busy=info.busy)
