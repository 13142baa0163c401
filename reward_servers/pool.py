"""The coordinator's pool of reward workers.

    score(group) -> wait for an idle worker -> one Ray call -> Scores
                        | worker dies or misses the group's deadline
                        v
                 kill it, start another under the same name, score the group again

Scoring is idempotent, so a group may be scored again. A group that fails on ``ATTEMPTS`` workers is returned as infra
errors: the run continues without it. After more than ``max_replacements`` replacements in an hour, every pending and
future ``score`` raises ``WorkerDied``: the host or the scorer is broken, and restarting workers forever would hide it.
"""

import asyncio
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from reward_servers.scorers.base import Place, infra_error
from reward_servers.worker import RewardWorker
from volley import pool_size
from volley.errors import DeadlineExceeded, VolleyError, WorkerDied
from volley.job import RewardWorkersSpec
from volley.processes import death_cause, last_lines
from volley.records import Group, Prompt, Scores, WorkerInfo
from volley.refs import Ref
from volley.restarts import Restarts
from volley.scoring import ScorerSpec

log = logging.getLogger(__name__)

ATTEMPTS = 2  # per group, each on another worker
STOP_GRACE_S = 5.0
GROUP_SHARE = 0.9  # of a group's deadline, which a scorer that waits for others may use


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """The part of a job that concerns reward workers.

    Attributes:
        scorer: the scorer that every worker builds.
        workers: number of workers, resources per worker, and deadlines.
        log_dir: folder for ``reward-<i>.log``.
        prefix: prefix of the workers' Ray names, so that runs on one cluster do not clash.
        keep_dir: folder that workers share, and a resumed run finds again; None: workers keep nothing.
    """

    scorer: ScorerSpec
    workers: RewardWorkersSpec
    log_dir: Path
    prefix: str = ""
    keep_dir: Path | None = None

    @property
    def place(self) -> Place:
        """Where each worker scores; a group should end before its worker counts as hung."""
        return Place(self.keep_dir, GROUP_SHARE * self.workers.group_deadline_s)


class RewardPool:
    """Scores groups on a set of workers that can grow, shrink and be replaced while in use."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers: dict[int, _Worker] = {}
        self._births: Counter[int] = Counter()
        self._living: set[_Worker] = set()  # includes retired and starting workers; `stop` ends them all
        self._idle: asyncio.LifoQueue[_Worker | BaseException] = asyncio.LifoQueue()
        self._failure: BaseException | None = None
        self._waiting = 0
        self._base = config.workers.count
        self._deaths: list[VolleyError] = []
        self._restarts = Restarts(config.workers.max_replacements)
        self._background: set[asyncio.Task[None]] = set()
        self._resize = asyncio.Lock()
        self._scaling: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: RewardConfig) -> "RewardPool":
        """Start ``config.workers.count`` workers and wait until all are ready.

        Raises:
            WorkerDied: a worker died during startup; the error includes its last log lines.
            DeadlineExceeded: a worker was not ready within ``start_deadline_s``.
        """
        pool = cls(config)
        try:
            await pool.scale(config.workers.count)
        except BaseException:
            await pool.stop()
            raise
        if config.workers.max_count is not None:
            pool._scaling = asyncio.create_task(pool._autoscale(config.workers.max_count))
        return pool

    @property
    def waiting(self) -> int:
        """Number of groups waiting for a worker; drives autoscaling."""
        return self._waiting

    @property
    def count(self) -> int:
        """Number of workers that are started and not retired."""
        return len(self._workers)

    @property
    def sandbox(self) -> str:
        """The weakest sandbox among the workers, as text; "" if the scorer runs no programs."""
        return min((worker.sandbox for worker in self._workers.values()), key=_strength, default="")

    @property
    def deaths(self) -> tuple[VolleyError, ...]:
        """The failures of all workers that died or hung, in order."""
        return tuple(self._deaths)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return information about every worker, ordered by index."""
        ordered = sorted(self._workers.values(), key=lambda worker: worker.index)
        return tuple(WorkerInfo(each.name, "serving", each.pid, busy=each.busy) for each in ordered)

    async def score(self, group: Ref[Group], prompt: Prompt) -> Scores:
        """Return one verdict per sample of the group behind the object reference ``group``.

        The group's deadline starts when a worker accepts it; waiting for an idle worker does not count.

        Raises:
            WorkerDied: workers died or hung more often than ``max_replacements`` allows, or the pool was stopped.
        """
        failure = ""
        for _ in range(ATTEMPTS):
            worker = await self._next_idle()
            answer = asyncio.ensure_future(self._score_on(worker, group, prompt))
            try:
                scores = await asyncio.shield(answer)
            except asyncio.CancelledError:
                self._in_background(self._reclaim(worker, answer))
                raise
            except (DeadlineExceeded, WorkerDied) as problem:
                failure = str(problem)
                log.warning("%s; replacing it", failure.splitlines()[0])
                await asyncio.shield(self._in_background(self._replace(worker, problem)))
            except RayError:  # the group itself is lost, as with its node; the worker is not
                await self._give_back(worker)
                raise
            else:
                await self._give_back(worker)
                return scores
        lost: Group = await _result(group, "the arrays of a group", self._config.workers.group_deadline_s)
        return Scores.pack([infra_error(failure)] * len(lost.texts))

    async def scale(self, count: int) -> None:
        """Start or retire workers until there are ``count``. A retired worker finishes its current group.

        Raises:
            WorkerDied, DeadlineExceeded: a worker did not start; the number of workers is unchanged.
        """
        if count < 1:
            raise ValueError(f"count {count}: a run needs at least one reward worker")
        self._base = count
        await self._resize_to(count)

    async def _resize_to(self, count: int) -> None:
        async with self._resize:
            missing = [i for i in range(count) if i not in self._workers]
            for worker in await self._spawn(missing):
                self._workers[worker.index] = worker
                self._idle.put_nowait(worker)
            for index in [i for i in self._workers if i >= count]:
                self._workers.pop(index).retired = True
            self._raise_failure()
            idle = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
            await asyncio.gather(*(self._give_back(worker) for worker in idle if isinstance(worker, _Worker)))

    async def stop(self) -> None:
        """Stop every worker and its child processes. Workers that are already dead are ignored."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.wait({self._scaling})
        self._fail(WorkerDied("reward-pool", "the pool was stopped"))
        while self._background:
            for task in self._background:
                task.cancel()
            await asyncio.wait(self._background)
        self._workers.clear()
        for worker in self._living:
            worker.retired = True
        await self._end(self._living)

    async def _score_on(self, worker: "_Worker", group: Ref[Group], prompt: Prompt) -> Scores:
        bound = self._config.workers.group_deadline_s
        worker.busy = 1
        try:
            asked = worker.actor.score.remote(group, prompt)
            scores: Scores = await _result(asked, f"{worker.name} to score a group", bound)
        except RayActorError as death:
            raise self._died(worker, death) from death
        finally:
            worker.busy = 0
        return scores

    async def _reclaim(self, worker: "_Worker", answer: "asyncio.Future[Scores]") -> None:
        """After a cancelled call, wait for the worker's answer, discard it and return the worker to the pool."""
        try:
            await answer
        except (DeadlineExceeded, WorkerDied) as problem:
            await self._replace(worker, problem)
        except RayError as problem:  # of the group, which nobody waits for any more
            log.warning("%s: %s", worker.name, str(problem).splitlines()[0])
            await self._give_back(worker)
        else:
            await self._give_back(worker)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in a task of its own, so that it finishes even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done_in_background)
        return task

    def _done_in_background(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("replacing a reward worker failed: %s", error)
            self._fail(error)

    def _fail(self, failure: BaseException) -> None:
        """Mark the pool as failed; every pending and future `score` raises ``failure``."""
        self._failure = self._failure or failure
        self._idle.put_nowait(self._failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _next_idle(self) -> "_Worker":
        self._raise_failure()
        self._waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self._waiting -= 1
        if isinstance(worker, BaseException):
            self._idle.put_nowait(worker)  # for the next waiting call
            raise worker
        return worker

    async def _give_back(self, worker: "_Worker") -> None:
        if worker.retired:
            await self._end([worker])
        else:
            self._idle.put_nowait(worker)

    async def _replace(self, worker: "_Worker", end: VolleyError) -> None:
        """Kill ``worker`` and start another in its place. Raises WorkerDied if ``max_replacements`` is exceeded."""
        await asyncio.to_thread(_kill, worker)
        self._living.discard(worker)
        if worker.retired:
            return
        try:
            fresh = await self._successor(worker, end)
        except BaseException:
            if self._workers.get(worker.index) is worker:
                del self._workers[worker.index]
            raise
        if self._workers.get(worker.index) is not worker:  # retired in the meantime
            await self._end([fresh])
            return
        self._workers[worker.index] = fresh
        self._idle.put_nowait(fresh)

    async def _successor(self, worker: "_Worker", end: VolleyError) -> "_Worker":
        while True:
            self._deaths.append(end)
            if not self._restarts.allow():
                most = self._config.workers.max_replacements
                raise WorkerDied(worker.name, f"workers were replaced {most} times within an hour; last error: {end}")
            try:
                (fresh,) = await self._spawn([worker.index])
            except (DeadlineExceeded, WorkerDied) as problem:
                end = problem
            else:
                return fresh

    async def _autoscale(self, most: int) -> None:
        """Adapt the number of workers to the queue. A worker that does not start is logged and retried later."""
        quiet = 0
        while self._failure is None:
            await asyncio.sleep(pool_size.LOOK_EVERY_S)
            quiet = quiet + 1 if self._waiting == 0 else 0
            high = max(most, self._base)
            wanted = pool_size.next_count(self.count, self._waiting, quiet, low=self._base, high=high)
            if wanted != self.count:
                quiet = 0
                try:
                    await self._resize_to(wanted)
                except VolleyError as problem:
                    log.warning("scaling to %d reward workers failed: %s", wanted, problem)

    async def _spawn(self, indices: list[int]) -> list["_Worker"]:
        self._raise_failure()
        started = [self._create(index) for index in indices]
        self._living.update(started)
        try:
            outcomes = await asyncio.gather(*(self._await_ready(worker) for worker in started), return_exceptions=True)
        except asyncio.CancelledError:
            self._in_background(self._end(started))
            raise
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self._end(started)
            raise failures[0]
        return started

    async def _end(self, workers: Collection["_Worker"]) -> None:
        ending = tuple(workers)
        await asyncio.gather(*(_end(worker) for worker in ending))
        self._living.difference_update(ending)

    def _create(self, index: int) -> "_Worker":
        name = f"reward-{index}"
        suffix = f".{self._births[index]}" if self._births[index] else ""  # Ray frees names of dead actors late
        self._births[index] += 1
        log_file = self._config.log_dir / f"{name}.log"
        actor = (
            ray.remote(RewardWorker)
            .options(
                name=f"{self._config.prefix}{name}{suffix}",
                num_cpus=self._config.workers.cpus,
                resources=self._config.workers.resources,
                max_restarts=0,
            )
            .remote(name, self._config.scorer, self._config.place, log_file, tuple(sys.path))
        )
        return _Worker(index, name, actor)

    async def _await_ready(self, worker: "_Worker") -> None:
        bound = self._config.workers.start_deadline_s
        try:
            worker.pid, worker.sandbox = await _result(worker.actor.ready.remote(), f"{worker.name} to start", bound)
        except RayActorError as death:
            raise self._died(worker, death) from death

    def _died(self, worker: "_Worker", death: RayActorError) -> WorkerDied:
        cause = death_cause(str(death)) or type(death).__name__
        return WorkerDied(worker.name, cause, last_lines(self._config.log_dir / f"{worker.name}.log"))


@dataclass(eq=False, slots=True)
class _Worker:
    index: int
    name: str
    actor: Any
    pid: int = 0
    sandbox: str = ""
    busy: int = 0
    retired: bool = False


def _strength(sandbox: str) -> int:
    """Return the rank of a sandbox: ``none`` is the weakest, then tiers C, B and A."""
    return 0 if sandbox.startswith("none") else 1 + "CBA".find(sandbox.removeprefix("tier ")[:1])


async def _result(ref: Any, awaited: str, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await ref
    except TimeoutError:
        raise DeadlineExceeded("coordinator", awaited, seconds) from None


async def _end(worker: _Worker) -> None:
    """Let the worker stop its child processes, then kill it."""
    with contextlib.suppress(RayActorError, TimeoutError):
        await _result(worker.actor.close.remote(), f"{worker.name} to close", STOP_GRACE_S)
    await asyncio.to_thread(_kill, worker)


def _kill(worker: _Worker) -> None:
    ray.kill(worker.actor, no_restart=True)
