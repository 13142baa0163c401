"""The actors of one run, as the coordinator sees them."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from actors.actor import Actor, log_path
from actors.config import ActorConfig, ActorInfo, ActorUpdate, BroadcastReport, GenerateRequest
from actors.environment import last_lines
from volley.errors import DeadlineExceeded, JobError, WorkerDied
from volley.records import GroupMeta, WeightUpdate

_T = TypeVar("_T")
CONCURRENT_CALLS = 100_000  # groups in flight per actor are bounded by admission, never here
STOP_SECONDS = 10.0
_RemoteActor: Any = ray.remote(max_restarts=0, max_task_retries=0)(Actor)


class _Member:
    """One actor and what is in flight on it."""

    def __init__(self, config: ActorConfig, index: int) -> None:
        spec = config.actors
        self.name = f"actor-{index}"
        self.samples = 0
        self.version = 0
        self.info: ActorInfo | None = None
        self._log = log_path(config.log_dir, self.name)
        self.handle = _RemoteActor.options(
            num_cpus=spec.cpus, num_gpus=spec.gpus, max_concurrency=CONCURRENT_CALLS
        ).remote(config, index)

    async def answer(self, ref: Awaitable[_T], awaited: str, seconds: float) -> _T:
        """What ``ref`` brings within ``seconds``.

        Raises:
            WorkerDied: the actor or its engine ended.
            DeadlineExceeded: it did not answer.
        """
        try:
            async with asyncio.timeout(seconds):
                return await ref
        except TimeoutError as error:
            raise DeadlineExceeded("actor pool", f"{self.name}: {awaited}", seconds) from error
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise WorkerDied(self.name, _one_line(error), last_lines(self._log)) from None


class ActorPool:
    """Starts actors, deals groups to the least loaded one, and passes new weights to all of them."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._members = [_Member(config, index) for index in range(config.actors.count)]
        self._version = 0

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
            async with asyncio.TaskGroup() as tasks:
                for member in pool._members:
                    tasks.create_task(pool._start(member))
        except BaseExceptionGroup as group:
            await pool.stop()
            raise group.exceptions[0] from None
        return pool

    @property
    def count(self) -> int:
        """Actors that serve."""
        return len(self._members)

    @property
    def version(self) -> int:
        """The newest version every actor serves."""
        return min((member.version for member in self._members), default=self._version)

    @property
    def infos(self) -> tuple[ActorInfo, ...]:
        return tuple(member.info for member in self._members if member.info is not None)

    async def generate(self, request: GenerateRequest) -> tuple[ObjectRef, GroupMeta]:
        """One group from the actor with the fewest samples in flight; the group itself stays in the object store.

        Raises:
            JobError: the prompt leaves no room for a sample.
            WorkerDied: the actor ended with the group unfinished.
            DeadlineExceeded: the group was not done within ``actors.group_deadline_s``.
        """
        member = min(self._members, key=lambda member: member.samples)
        if member.info is not None and len(request.prompt_p) >= member.info.max_model_len:
            raise JobError(
                f"prompt {request.prompt_id!r} has {len(request.prompt_p)} tokens and the model takes "
                f"{member.info.max_model_len}: shorten it, or drop it from the data"
            )
        member.samples += request.n
        try:
            group, meta = member.handle.generate.options(num_returns=2).remote(request)
            awaited = f"group {request.group_id}"
            return group, await member.answer(meta, awaited, self._config.actors.group_deadline_s)
        finally:
            member.samples -= request.n

    async def broadcast(self, update: WeightUpdate) -> BroadcastReport:
        """Pass ``update`` to every actor while they generate; each one takes it as soon as it has it.

        Raises:
            WorkerDied: an actor ended.
            DeadlineExceeded: an actor did not take it within ``actors.group_deadline_s``.
        """
        started = time.perf_counter()
        updates = await _all(self._update(member, update) for member in self._members)
        self._version = update.version
        return BroadcastReport(update.version, tuple(updates), time.perf_counter() - started)

    async def served_weights(self) -> dict[str, NDArray[np.uint8]]:
        """By actor, the weights its engine computes with: a safetensors file in checkpoint names."""
        deadline = self._config.actors.group_deadline_s
        files = await _all(
            member.answer(member.handle.served_weights.remote(), "served weights", deadline) for member in self._members
        )
        return {member.name: file for member, file in zip(self._members, files, strict=True)}

    async def stop(self) -> None:
        """End every actor and its engine."""
        members, self._members = self._members, []
        await asyncio.gather(*(self._stop(member) for member in members))

    async def _start(self, member: _Member) -> None:
        spec = self._config.actors
        member.info = await member.answer(
            member.handle.start.remote(), f"start with {spec.cpus:g} CPUs and {spec.gpus:g} GPUs", spec.start_deadline_s
        )

    async def _update(self, member: _Member, update: WeightUpdate) -> ActorUpdate:
        deadline = self._config.actors.group_deadline_s
        done: ActorUpdate = await member.answer(
            member.handle.update.remote(update), f"weights {update.version}", deadline
        )
        member.version = done.version
        return done

    async def _stop(self, member: _Member) -> None:
        await asyncio.wait([asyncio.ensure_future(_settled(member.handle.stop.remote()))], timeout=STOP_SECONDS)
        ray.kill(member.handle)


async def _settled(ref: Awaitable[Any]) -> None:
    await asyncio.gather(ref, return_exceptions=True)


async def _all(work: Any) -> list[Any]:
    """Results in order; the first error stops the rest and is raised by itself."""
    tasks: list[asyncio.Task[Any]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
