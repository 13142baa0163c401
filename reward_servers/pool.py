"""The pool of reward workers, as the coordinator holds it.

    score(group) -> wait for an idle worker -> one Ray call -> Scores
                        | worker dies, or is silent past the group's deadline
                        v
                 kill it, start another under the same name, score the group again

Scoring is idempotent, so a group may be scored again. A group that took ``ATTEMPTS`` workers with it comes back as
infra errors: it leaves the run instead of ending it. More than ``respawns`` replacements in all raise ``WorkerDied``
from every ``score``, waiting or to come: something is wrong with the host or the scorer, and starting workers for ever
would hide it.
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
from ray.exceptions import RayActorError

from reward_servers.scorers.base import infra_error
from reward_servers.worker import RewardWorker
from volley.errors import DeadlineExceeded, VolleyError, WorkerDied
from volley.job import RewardWorkersSpec
from volley.records import Group, Prompt, Scores, WorkerInfo
from volley.restarts import Restarts
from volley.scoring import ScorerSpec

log = logging.getLogger(__name__)

ATTEMPTS = 2  # workers one group may cost
LOG_TAIL_LINES = 20
STOP_GRACE_S = 5.0
LOOK_EVERY_S = 1.0
LOOKS_AT_REST = 30


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """What a pool needs to know of its job.

    Attributes:
        scorer: how samples are judged.
        workers: how many workers, what each reserves, the deadlines.
        log_dir: folder for ``reward-<i>.log``.
        prefix: put before the Ray names of the workers, so that runs on one cluster do not clash.
        most: workers the pool may grow to while groups wait; None: it stays at the count it was given.
        respawns: replacements of dead or stuck workers in the pool's life.
    """

    scorer: ScorerSpec
    workers: RewardWorkersSpec
    log_dir: Path
    prefix: str = ""
    most: int | None = None
    respawns: int = 20


class RewardPool:
    """Scores groups on a set of workers that can grow, shrink and be replaced while in use."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers: dict[int, _Worker] = {}
        self._births: Counter[int] = Counter()
        self._living: set[_Worker] = set()  # retired and starting ones too: all that `stop` has to end
        self._idle: asyncio.LifoQueue[_Worker | BaseException] = asyncio.LifoQueue()
        self._failure: BaseException | None = None
        self._waiting = 0
        self._base = config.workers.count
        self._deaths: list[VolleyError] = []
        self._restarts = Restarts(config.respawns)
        self._background: set[asyncio.Task[None]] = set()
        self._resize = asyncio.Lock()
        self._scaling: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: RewardConfig) -> "RewardPool":
        """Start ``config.workers.count`` workers and wait until all can score.

        Raises:
            WorkerDied: a worker ended while it started; carries its last log lines.
            DeadlineExceeded: a worker was not ready within ``start_deadline_s``.
        """
        pool = cls(config)
        try:
            await pool.scale(config.workers.count)
        except BaseException:
            await pool.stop()
            raise
        if config.most is not None:
            pool._scaling = asyncio.create_task(pool._autoscale(config.most))
        return pool

    @property
    def waiting(self) -> int:
        """Groups that wait for a worker: what autoscaling looks at."""
        return self._waiting

    @property
    def count(self) -> int:
        """Workers started and not retired."""
        return len(self._workers)

    @property
    def sandbox(self) -> str:
        """What isolates the programs the workers run: the weakest of them; empty where they run none."""
        return min((worker.sandbox for worker in self._workers.values()), key=_strength, default="")

    @property
    def deaths(self) -> tuple[VolleyError, ...]:
        """How workers ended that were not asked to, in order."""
        return tuple(self._deaths)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Every worker, by index."""
        ordered = sorted(self._workers.values(), key=lambda worker: worker.index)
        return tuple(WorkerInfo(each.name, "serving", each.pid, busy=each.busy) for each in ordered)

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        """One verdict per sample of the group that the object reference ``group`` stands for.

        The group's deadline counts from the moment a worker takes it, not while it waits for one.

        Raises:
            WorkerDied: workers died or hung more often than ``respawns`` allows, or the pool was stopped.
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
            else:
                await self._give_back(worker)
                return scores
        lost: Group = await _result(group, "the arrays of a group", self._config.workers.group_deadline_s)
        return Scores.pack([infra_error(failure)] * len(lost.texts))

    async def scale(self, count: int) -> None:
        """Start or retire workers until there are ``count``. A retired worker finishes the group it has.

        Raises:
            WorkerDied, DeadlineExceeded: a worker did not start; there are as many as before.
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
        """End every worker and what it started. Raises nothing for a worker that is dead already."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.wait({self._scaling})
        self._fail(WorkerDied("reward-pool", "it was stopped"))
        while self._background:
            for task in self._background:
                task.cancel()
            await asyncio.wait(self._background)
        self._workers.clear()
        for worker in self._living:
            worker.retired = True
        await self._end(self._living)

    async def _score_on(self, worker: "_Worker", group: Any, prompt: Prompt) -> Scores:
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
        """Nobody wants this answer any more: the worker scores other groups once it has given it."""
        try:
            await answer
        except (DeadlineExceeded, WorkerDied) as problem:
            await self._replace(worker, problem)
        else:
            await self._give_back(worker)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that must be done to the end, whoever asked for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done_in_background)
        return task

    def _done_in_background(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker is not replaced: %s", error)
            self._fail(error)

    def _fail(self, failure: BaseException) -> None:
        """No worker will come any more: whoever waits for one is told."""
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
            self._idle.put_nowait(worker)  # for the next that waits
            raise worker
        return worker

    async def _give_back(self, worker: "_Worker") -> None:
        if worker.retired:
            await self._end([worker])
        else:
            self._idle.put_nowait(worker)

    async def _replace(self, worker: "_Worker", end: VolleyError) -> None:
        """Kill ``worker`` and start another in its place. Raises WorkerDied when the pool's respawns are used up."""
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
        if self._workers.get(worker.index) is not worker:  # retired meanwhile
            await self._end([fresh])
            return
        self._workers[worker.index] = fresh
        self._idle.put_nowait(fresh)

    async def _successor(self, worker: "_Worker", end: VolleyError) -> "_Worker":
        while True:
            self._deaths.append(end)
            if not self._restarts.allow():
                most = self._config.respawns
                raise WorkerDied(worker.name, f"workers were replaced {most} times within an hour; the last: {end}")
            try:
                (fresh,) = await self._spawn([worker.index])
            except (DeadlineExceeded, WorkerDied) as problem:
                end = problem
            else:
                return fresh

    async def _autoscale(self, most: int) -> None:
        """Follow the queue. A worker that does not start is logged and tried again: the run goes on without it."""
        quiet = 0
        while self._failure is None:
            await asyncio.sleep(LOOK_EVERY_S)
            quiet = quiet + 1 if self._waiting == 0 else 0
            high = max(most, self._base)
            wanted = next_count(self.count, self._waiting, quiet, low=self._base, high=high)
            if wanted != self.count:
                quiet = 0
                try:
                    await self._resize_to(wanted)
                except VolleyError as problem:
                    log.warning("scaling to %d reward workers: %s", wanted, problem)

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
        suffix = f".{self._births[index]}" if self._births[index] else ""  # Ray frees a dead actor's name late
        self._births[index] += 1
        actor = (
            ray.remote(RewardWorker)
            .options(
                name=f"{self._config.prefix}{name}{suffix}",
                num_cpus=self._config.workers.cpus,
                resources=self._config.workers.resources,
                max_restarts=0,
            )
            .remote(name, self._config.scorer, self._config.log_dir / f"{name}.log", tuple(sys.path))
        )
        return _Worker(index, name, actor)

    async def _await_ready(self, worker: "_Worker") -> None:
        bound = self._config.workers.start_deadline_s
        try:
            worker.pid, worker.sandbox = await _result(worker.actor.ready.remote(), f"{worker.name} to start", bound)
        except RayActorError as death:
            raise self._died(worker, death) from death

    def _died(self, worker: "_Worker", death: RayActorError) -> WorkerDied:
        cause = next((line for line in str(death).splitlines() if line.strip()), type(death).__name__)
        return WorkerDied(worker.name, cause, _tail(self._config.log_dir / f"{worker.name}.log"))


def next_count(count: int, waiting: int, quiet: int, *, low: int, high: int) -> int:
    """How many workers there should be: twice as many while more groups wait than workers work, one fewer after rest.

    Args:
        count: workers now.
        waiting: groups that wait for one.
        quiet: looks in a row at which none waited.
        low, high: bounds.
    """
    if waiting > count:
        return min(high, 2 * count)
    return max(low, count - 1) if quiet >= LOOKS_AT_REST and count > low else count


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
    """``none`` is the weakest, then tiers C, B and A."""
    return 0 if sandbox.startswith("none") else 1 + "CBA".find(sandbox.removeprefix("tier ")[:1])


async def _result(ref: Any, awaited: str, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await ref
    except TimeoutError:
        raise DeadlineExceeded("coordinator", awaited, seconds) from None


async def _end(worker: _Worker) -> None:
    """Let the worker end its own child processes, then end it."""
    with contextlib.suppress(RayActorError, TimeoutError):
        await _result(worker.actor.close.remote(), f"{worker.name} to close", STOP_GRACE_S)
    await asyncio.to_thread(_kill, worker)


def _kill(worker: _Worker) -> None:
    ray.kill(worker.actor, no_restart=True)


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
