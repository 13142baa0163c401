"""The environment workers of one run.

    run(prompt, sessions) -> wait for a worker with room -> one Ray call -> outcomes, and which other episodes ended
                                | worker dies or misses the deadline
                                v
                       kill it, start another under the same name; the group is lost, and made again with new sessions

An episode takes up room only while it runs. A group goes to a worker as soon as one of its episodes can start there;
the worker starts the others in order as running ones end. The pool learns which of a worker's episodes have ended
whenever one of its groups ends. If each group has a slow episode, that may take long, so while groups wait the pool
also asks: twice per second, and only a few workers, since every Ray call costs the coordinator CPU time.

A worker with a program that cannot be ended is replaced too: at once if the program blocks the event loop that all
share, otherwise when its other groups have ended. After more than ``max_replacements`` within an hour, every pending
and future `run` raises what the last one died of.
"""

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from environments.loads import EnvironmentHandle, Loads
from environments.records import EnvironmentConfig, EpisodesDone, Usage
from environments.worker import EnvironmentWorker
from volley import pool_size
from volley.errors import DeadlineExceeded, GroupGone, VolleyError, WorkerDied
from volley.processes import death_cause, last_lines
from volley.records import Prompt, WorkerInfo
from volley.restarts import Restarts
from volley.rollout import PROGRAM_GRACE_S

log = logging.getLogger(__name__)
_T = TypeVar("_T")
CLOSE_SECONDS = 5.0
LOOK_EVERY_S, LOOKS_AT_ONCE, LOOK_DEADLINE_S = 0.5, 8, 2.0
CALM_LOOK_S = 5.0  # age of a report at which a worker is asked even if no group waits, so that `usage` is true


class EnvironmentPool:
    """Lives in the coordinator's process, on its event loop."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._loads = Loads()
        self._births: Counter[int] = Counter()
        self._base = self._wanted = config.workers.count  # the user's number, and what autoscaling makes of it
        self._waiting = 0
        self._turn = asyncio.Lock()  # held by the first of the waiting groups
        self._living: set[EnvironmentHandle] = set()
        self._deaths: list[VolleyError] = []
        self._restarts = Restarts(config.workers.max_replacements)
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._resize = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()

    @classmethod
    async def start(cls, config: EnvironmentConfig) -> "EnvironmentPool":
        """Start ``config.workers.count`` workers and wait until all are ready. Ray must be initialised.

        Raises:
            JobError: the program cannot be imported or called.
            WorkerDied, DeadlineExceeded: a worker ended while starting, or took too long.
        """
        pool = cls(config)
        try:
            await pool.scale(config.workers.count)
        except BaseException:
            await pool.stop()
            raise
        pool._looking = asyncio.create_task(pool._look())
        if config.workers.max_count is not None:
            pool._scaling = asyncio.create_task(pool._autoscale(config.workers.max_count))
        return pool

    @property
    def count(self) -> int:
        """Number of workers that run programs."""
        return len(self._loads.workers)

    @property
    def waiting(self) -> int:
        """Number of groups waiting for a worker with room. One that is partly running has its worker."""
        return self._waiting

    @property
    def deaths(self) -> tuple[VolleyError, ...]:
        """Why workers were replaced, in order."""
        return tuple(self._deaths)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers by index; ``busy`` counts episodes that run."""
        ordered = sorted(self._loads.workers.values(), key=lambda worker: worker.index)
        return tuple(WorkerInfo(each.name, "serving", each.pid, busy=each.running) for each in ordered)

    def usage(self) -> Usage:
        """How much the workers were used so far."""
        return self._loads.usage()

    async def run(self, prompt: Prompt, base_url: str, keys: tuple[str, ...]) -> EpisodesDone:
        """Run one episode per key, all with the row of ``prompt``.

        The deadline starts when a worker accepts them, and allows for those that first wait there; an episode's own
        starts with its program.

        Raises:
            GroupGone: the worker died or hung, so nobody knows what the programs did. It is being replaced.
            WorkerDied, DeadlineExceeded, JobError: workers may not be replaced any more, or do not start.
        """
        worker = await self._with_room()
        row = {**prompt.reference, "id": prompt.id, "prompt": prompt.text}
        seconds = self._deadline(worker.episodes + len(keys))
        number = self._loads.give(worker, len(keys))
        try:
            done = await self._ask(worker, seconds, number, row, base_url, keys)
            self._loads.note(worker, done.left)
        except (WorkerDied, DeadlineExceeded) as end:
            await self._lost(worker, end)
            raise GroupGone(f"episodes were lost with their worker: {str(end).partition(chr(10))[0]}") from end
        finally:
            self._loads.take_back(worker, number)
            await self._notify()
            if worker.retired and not worker.left:
                self._end(worker)
        if done.stuck:
            worker.stuck = worker.stuck or f"a program that timed out still blocks its {done.stuck}"
            self._loads.shut(worker)
        if worker.stuck and (done.stuck == "loop" or not worker.left):
            await self._lost(worker, WorkerDied(worker.name, worker.stuck))
        return replace(done, worker=worker.name)

    async def scale(self, count: int) -> None:
        """Start or retire workers until there are ``count``. A retired worker finishes its episodes.

        Raises:
            JobError: the program cannot be imported or called.
            WorkerDied, DeadlineExceeded: a worker did not start; the number of workers is unchanged.
        """
        if count < 1:
            raise ValueError(f"count {count}: a run with a program needs at least one environment worker")
        await self._resize_to(count)
        self._base = count

    async def stop(self) -> None:
        """End all workers, and all programs with them."""
        self._failure = self._failure or WorkerDied("environment-pool", "the pool was stopped")
        tasks = [*self._replacing.values(), *filter(None, [self._looking, self._scaling])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._loads.clear()
        for worker in tuple(self._living):
            self._end(worker)
        await asyncio.gather(*self._ending)
        await self._notify()

    async def _with_room(self) -> EnvironmentHandle:
        """The least loaded worker, once it has room. Groups get it in the order of their calls."""
        self._waiting += 1
        try:
            async with self._turn, self._changed:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if (worker := self._loads.free()) is not None:
                        return worker
                    await self._changed.wait()
        finally:
            self._waiting -= 1

    def _deadline(self, episodes: int) -> float:
        """Seconds for the newest group of a worker that has this many episodes, the group's included.

        They start in order, and each has the same time from its start, so the last one starts at the latest when those
        that do not fit beside it have used up theirs.
        """
        rounds = math.ceil(episodes / self._config.workers.episodes)
        return rounds * (self._config.rollout.timeout_s + PROGRAM_GRACE_S)

    async def _ask(
        self,
        worker: EnvironmentHandle,
        seconds: float,
        number: int,
        row: Mapping[str, Any],
        base_url: str,
        keys: tuple[str, ...],
    ) -> EpisodesDone:
        ref = worker.actor.run.remote(number, row, base_url, keys)
        try:
            done: EpisodesDone = await self._answer(worker, ref, "episodes", seconds)
        except asyncio.CancelledError:
            ray.cancel(ref)  # the programs themselves end when their sessions are closed
            asyncio.gather(ref, return_exceptions=True)
            raise
        return done

    async def _look(self) -> None:
        """Ask the workers that did not report for the longest time which of their episodes have ended."""
        try:
            while self._failure is None:
                await asyncio.sleep(LOOK_EVERY_S)
                silent = self._loads.unheard(LOOK_EVERY_S if self._waiting else CALM_LOOK_S, LOOKS_AT_ONCE)
                await asyncio.gather(*(self._look_at(worker) for worker in silent))
        except Exception as error:  # noqa: BLE001 - nothing awaits this task: every `run` raises it
            self._failure = error
        finally:
            await self._notify()

    async def _look_at(self, worker: EnvironmentHandle) -> None:
        worker.heard = time.monotonic()  # one that does not answer has its next turn after the others
        with contextlib.suppress(WorkerDied, DeadlineExceeded):  # whoever waits for its groups sees to that
            self._loads.note(worker, await self._answer(worker, worker.actor.left.remote(), "look", LOOK_DEADLINE_S))
            await self._notify()

    async def _resize_to(self, count: int) -> None:
        async with self._resize:
            fresh: dict[int, EnvironmentHandle] = {}
            while missing := sorted({*range(count)} - {*self._loads.workers, *self._replacing, *fresh}):
                if self._failure is not None:
                    raise self._failure
                started = await asyncio.gather(*(self._started(index) for index in missing), return_exceptions=True)
                fresh |= {each.index: each for each in started if isinstance(each, EnvironmentHandle)}
                if failures := [each for each in started if isinstance(each, BaseException)]:
                    for worker in fresh.values():
                        self._kill(worker)
                    raise failures[0]
            self._wanted = count
            for worker in fresh.values():
                self._loads.add(worker)
            for index in [i for i in self._loads.workers if i >= count]:
                self._retire(self._loads.workers[index])
        await self._notify()

    def _retire(self, worker: EnvironmentHandle) -> None:
        self._loads.remove(worker)
        worker.retired = True
        if not worker.left:
            self._end(worker)

    def _end(self, worker: EnvironmentHandle) -> None:
        if worker.closing:
            return
        worker.closing = True
        task = asyncio.create_task(self._close(worker), name=f"close {worker.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _close(self, worker: EnvironmentHandle) -> None:
        """Let the program's class release what it holds, then end the process."""
        try:
            if worker in self._living and worker.pid and not worker.stuck:
                with contextlib.suppress(WorkerDied, DeadlineExceeded):
                    await self._answer(worker, worker.actor.close.remote(), "close", CLOSE_SECONDS)
        finally:
            self._kill(worker)

    async def _autoscale(self, most: int) -> None:
        """Adapt the number of workers to the queue. A worker that does not start is logged and retried later."""
        quiet = 0
        while self._failure is None:
            await asyncio.sleep(pool_size.LOOK_EVERY_S)
            quiet = quiet + 1 if self._waiting == 0 else 0
            wanted = pool_size.next_count(
                self._wanted, self._waiting, quiet, low=self._base, high=max(most, self._base)
            )
            if wanted != self._wanted:
                quiet = 0
                try:
                    await self._resize_to(wanted)
                except VolleyError as problem:
                    log.warning("scaling to %d environment workers failed: %s", wanted, problem)

    async def _started(self, index: int) -> EnvironmentHandle:
        """A worker that is ready to run programs; raises as `start`."""
        worker = self._create(index)
        try:
            awaited = f"start with {self._config.workers.cpus:g} CPUs"
            worker.pid = await self._answer(
                worker, worker.actor.ready.remote(), awaited, self._config.workers.start_deadline_s
            )
        except BaseException:
            self._kill(worker)
            raise
        return worker

    def _create(self, index: int) -> EnvironmentHandle:
        name = f"environment-{index}"
        suffix = f".{self._births[index]}" if self._births[index] else ""  # Ray frees names of dead actors late
        self._births[index] += 1
        spec = self._config.workers
        actor = (
            ray.remote(EnvironmentWorker)
            .options(
                name=f"{self._config.prefix}{name}{suffix}",
                num_cpus=spec.cpus,
                resources=spec.resources,
                max_restarts=0,
                max_concurrency=2 * spec.episodes + 2,  # groups, some of which just end; looks and `close`
            )
            .remote(self._config.rollout, self._log_of(name), tuple(sys.path), spec)
        )
        worker = EnvironmentHandle(index, name, actor, spec.episodes)
        self._living.add(worker)
        return worker

    async def _lost(self, worker: EnvironmentHandle, end: VolleyError) -> None:
        """Kill the worker and start its replacement, once however many groups it lost, unless it is retired."""
        if self._loads.workers.get(worker.index) is not worker:
            self._kill(worker)
            return
        self._loads.remove(worker)
        log.warning("%s; replacing it", str(end).partition("\n")[0])
        self._kill(worker)
        if self._count_death(end):
            task = asyncio.create_task(self._replace(worker.index), name=f"replace {worker.name}")
            self._replacing[worker.index] = task
        await self._notify()

    async def _replace(self, index: int) -> None:
        try:
            while True:
                try:
                    fresh = await self._started(index)
                except (WorkerDied, DeadlineExceeded) as end:
                    if not self._count_death(end):
                        return
                else:
                    break
            self._loads.add(fresh)
            if index >= self._wanted:  # scaled down in the meantime
                self._retire(fresh)
        except Exception as error:  # noqa: BLE001 - nothing awaits this task: every `run` raises it
            self._failure = error
        finally:
            del self._replacing[index]
            await self._notify()

    def _count_death(self, end: VolleyError) -> bool:
        self._deaths.append(end)
        if not self._restarts.allow():
            self._failure = end
        return self._failure is None

    def _kill(self, worker: EnvironmentHandle) -> None:
        if worker in self._living:
            self._living.discard(worker)
            ray.kill(worker.actor, no_restart=True)

    def _log_of(self, name: str) -> Path:
        return self._config.log_dir / f"{name}.log"

    async def _answer(self, worker: EnvironmentHandle, ref: Awaitable[_T], awaited: str, seconds: float) -> _T:
        try:
            async with asyncio.timeout(seconds):
                return await ref
        except TimeoutError:
            raise DeadlineExceeded("environment pool", f"{worker.name}: {awaited}", seconds) from None
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            cause = death_cause(str(error)) or type(error).__name__
            raise WorkerDied(worker.name, cause, last_lines(self._log_of(worker.name))) from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
