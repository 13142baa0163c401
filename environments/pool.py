"""The environment workers of one run.

    run(prompt, sessions) -> wait for a worker with room -> one Ray call -> outcomes
                                | worker dies or misses the deadline
                                v
                       kill it, start another under the same name; the group is lost, and made again with new sessions

A worker with a program that cannot be ended is replaced too: at once if the program blocks the event loop that all
share, otherwise when its other groups have ended. After more than ``max_replacements`` within an hour, every pending
and future `run` raises what the last one died of.
"""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from environments.records import EnvironmentConfig, EpisodesDone
from environments.worker import EnvironmentWorker
from volley.errors import DeadlineExceeded, GroupGone, VolleyError, WorkerDied
from volley.processes import death_cause, last_lines
from volley.records import Prompt, WorkerInfo
from volley.restarts import Restarts
from volley.rollout import PROGRAM_GRACE_S

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class EnvironmentPool:
    """Lives in the coordinator's process, on its event loop."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._workers: dict[int, _Worker] = {}
        self._births: Counter[int] = Counter()
        self._living: set[_Worker] = set()
        self._deaths: list[VolleyError] = []
        self._restarts = Restarts(config.workers.max_replacements)
        self._replacing: set[asyncio.Task[None]] = set()
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
            await asyncio.gather(*(pool._start_one(index) for index in range(config.workers.count)))
        except BaseException:
            await pool.stop()
            raise
        return pool

    @property
    def count(self) -> int:
        """Number of workers that run programs."""
        return len(self._workers)

    @property
    def deaths(self) -> tuple[VolleyError, ...]:
        """Why workers were replaced, in order."""
        return tuple(self._deaths)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers by index; ``busy`` counts episodes."""
        ordered = sorted(self._workers.values(), key=lambda worker: worker.index)
        return tuple(WorkerInfo(each.name, "serving", each.pid, busy=each.episodes) for each in ordered)

    async def run(self, prompt: Prompt, base_url: str, keys: tuple[str, ...]) -> EpisodesDone:
        """Run one episode per key, all with the row of ``prompt``.

        The deadline starts when a worker accepts them; waiting for room does not count.

        Raises:
            GroupGone: the worker died or hung, so nobody knows what the programs did. It is being replaced.
            WorkerDied, DeadlineExceeded, JobError: workers may not be replaced any more, or do not start.
        """
        worker = await self._with_room(len(keys))
        row = {**prompt.reference, "id": prompt.id, "prompt": prompt.text}
        worker.episodes += len(keys)
        try:
            done = await self._ask(worker, row, base_url, keys)
        except (WorkerDied, DeadlineExceeded) as end:
            await self._lost(worker, end)
            raise GroupGone(f"episodes were lost with their worker: {str(end).partition(chr(10))[0]}") from end
        finally:
            worker.episodes -= len(keys)
            await self._notify()
        if done.stuck:
            worker.stuck = worker.stuck or f"a program that timed out still blocks its {done.stuck}"
        if worker.stuck and (done.stuck == "loop" or worker.episodes == 0):
            await self._lost(worker, WorkerDied(worker.name, worker.stuck))
        return done

    async def stop(self) -> None:
        """End all workers, and all programs with them."""
        self._failure = self._failure or WorkerDied("environment-pool", "the pool was stopped")
        for task in tuple(self._replacing):
            task.cancel()
        if self._replacing:
            await asyncio.wait(tuple(self._replacing))
        self._workers.clear()
        for worker in tuple(self._living):
            self._kill(worker)
        await self._notify()

    async def _with_room(self, episodes: int) -> "_Worker":
        def free() -> list[_Worker]:
            room = self._config.workers.episodes - episodes
            return [each for each in self._workers.values() if not each.stuck and each.episodes <= room]

        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or free())
            if self._failure is not None:
                raise self._failure
            return min(free(), key=lambda worker: (worker.episodes, worker.index))

    async def _ask(
        self, worker: "_Worker", row: Mapping[str, Any], base_url: str, keys: tuple[str, ...]
    ) -> EpisodesDone:
        ref = worker.actor.run.remote(row, base_url, keys)
        try:
            seconds = self._config.rollout.timeout_s + PROGRAM_GRACE_S
            done: EpisodesDone = await self._answer(worker, ref, "episodes", seconds)
        except asyncio.CancelledError:
            ray.cancel(ref)  # the programs themselves end when their sessions are closed
            asyncio.gather(ref, return_exceptions=True)
            raise
        return done

    async def _start_one(self, index: int) -> None:
        worker = self._create(index)
        try:
            awaited = f"start with {self._config.workers.cpus:g} CPUs"
            worker.pid = await self._answer(
                worker, worker.actor.ready.remote(), awaited, self._config.workers.start_deadline_s
            )
        except BaseException:
            self._kill(worker)
            raise
        self._workers[index] = worker
        await self._notify()

    def _create(self, index: int) -> "_Worker":
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
                max_concurrency=spec.episodes + 1,
            )
            .remote(self._config.rollout, self._log_of(name), tuple(sys.path))
        )
        worker = _Worker(index, name, actor)
        self._living.add(worker)
        return worker

    async def _lost(self, worker: "_Worker", end: VolleyError) -> None:
        """Kill the worker and start its replacement, once however many groups it lost."""
        if self._workers.get(worker.index) is not worker:
            return
        del self._workers[worker.index]
        log.warning("%s; replacing it", str(end).partition("\n")[0])
        self._kill(worker)
        if self._count_death(end):
            task = asyncio.create_task(self._replace(worker.index), name=f"replace {worker.name}")
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
        await self._notify()

    async def _replace(self, index: int) -> None:
        try:
            while True:
                try:
                    return await self._start_one(index)
                except (WorkerDied, DeadlineExceeded) as end:
                    if not self._count_death(end):
                        return None
        except Exception as error:  # noqa: BLE001 - nothing awaits this task: every `run` raises it
            self._failure = error
        finally:
            await self._notify()

    def _count_death(self, end: VolleyError) -> bool:
        self._deaths.append(end)
        if not self._restarts.allow():
            self._failure = end
        return self._failure is None

    def _kill(self, worker: "_Worker") -> None:
        self._living.discard(worker)
        ray.kill(worker.actor, no_restart=True)

    def _log_of(self, name: str) -> Path:
        return self._config.log_dir / f"{name}.log"

    async def _answer(self, worker: "_Worker", ref: Awaitable[_T], awaited: str, seconds: float) -> _T:
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


@dataclass(eq=False, slots=True)
class _Worker:
    index: int
    name: str
    actor: Any
    pid: int = 0
    episodes: int = 0
    stuck: str = ""
