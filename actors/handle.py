"""A handle on one actor, for the coordinator's process: calls have deadlines, errors the actor's last log lines."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError

from actors.actor import Actor, log_path
from actors.config import ActorConfig, ActorInfo, ActorUpdate, EpisodesRequest, GenerateRequest, OpenedSessions
from actors.gateway.groups import EpisodeReport
from actors.late_weights import LateWeights
from volley.errors import DeadlineExceeded, WeightsGone, WorkerDied
from volley.forking import ray_options
from volley.processes import death_cause, last_lines
from volley.records import Group, GroupMeta, WeightUpdate, WorkerInfo
from volley.refs import Ref
from volley.weight_group import WeightGroupTerms

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_RemoteActor = ray.remote(max_restarts=0, max_task_retries=0)(Actor)
CONCURRENT_CALLS = 100_000  # admission bounds the groups in flight, and an update must not wait for one of them
STOP_SECONDS = 10.0


class ActorHandle:
    """One actor. Every call may raise ``WorkerDied`` or ``DeadlineExceeded`` with the actor's name.

    Attributes:
        index: number of the actor within the run, from 0.
        name: ``actor-<index>``.
        samples: samples in flight.
        version: version of the weights it serves.
        info: None until it has started.
        idle: set while it neither generates nor changes weights.
    """

    def __init__(self, config: ActorConfig, index: int, late_weights: LateWeights) -> None:
        self.index, self.name = index, f"actor-{index}"
        self.samples = 0
        self._calls = 0  # that must end before it is stopped
        self.version = 0
        self.info: ActorInfo | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._spec, self._late_weights = config.actors, late_weights
        self._log = log_path(config.log_dir, self.name)
        name = f"volley-{os.getpid()}-{uuid.uuid4().hex[:8]}"  # short: sockets go there, whose paths are limited
        self._scratch = Path(tempfile.gettempdir()) / name
        self._handle = _RemoteActor.options(
            num_cpus=self._spec.cpus,
            num_gpus=self._spec.gpus,
            resources=self._spec.resources,
            max_concurrency=CONCURRENT_CALLS,
            **(ray_options() if not self._spec.gpus else {}),
        ).remote(config, index, self._scratch)

    def view(self, state: Literal["starting", "serving", "draining"]) -> WorkerInfo:
        """What the pool reports about it."""
        pid = self.info.pid if self.info else 0
        return WorkerInfo(self.name, state, pid, self.version if self.info else None, self.samples)

    async def start(self) -> None:
        """Wait until it serves the model's original weights at full speed.

        Raises:
            JobError: the model does not load, or vLLM does not have an engine option.
        """
        awaited = f"start with {self._spec.cpus:g} CPUs and {self._spec.gpus:g} GPUs"
        self.info = await self._answer(self._handle.start.remote(), awaited, self._spec.start_deadline_s)

    async def generate(self, request: GenerateRequest) -> tuple[Ref[Group], GroupMeta]:
        """Generate a group. If this call is cancelled or exceeds its deadline, the actor gives the group up too."""
        with self.in_flight(request.n):
            group, meta = self._handle.generate.options(num_returns=2).remote(request)
            try:
                return group, await self._answer(meta, f"group {request.group_id}", self._spec.group_deadline_s)
            except BaseException:
                ray.cancel(meta)
                asyncio.gather(group, meta, return_exceptions=True)  # or Ray would report errors that nothing retrieved
                raise

    async def open_sessions(self, request: EpisodesRequest) -> OpenedSessions:
        """Open sessions for the episodes of a group."""
        awaited = f"sessions of group {request.group_id}"
        opened: OpenedSessions = await self._answer(
            self._handle.open_sessions.remote(request), awaited, self._spec.group_deadline_s
        )
        return opened

    async def close_sessions(
        self, request: EpisodesRequest, opened: OpenedSessions
    ) -> tuple[Ref[Group], GroupMeta, tuple[EpisodeReport, ...]]:
        """End the sessions; returns what they recorded."""
        group, described = self._handle.close_sessions.options(num_returns=2).remote(request, opened)
        try:
            awaited = f"the record of group {request.group_id}"
            meta, reports = await self._answer(described, awaited, self._spec.group_deadline_s)
        except BaseException:
            asyncio.gather(group, described, return_exceptions=True)  # as in `generate`
            raise
        return group, meta, reports

    def drop_sessions(self, request: EpisodesRequest, opened: OpenedSessions) -> None:
        """End the sessions in the background, and drop what they recorded."""
        refs = self._handle.close_sessions.options(num_returns=2).remote(request, opened)
        asyncio.gather(*refs, return_exceptions=True)

    @contextlib.contextmanager
    def in_flight(self, samples: int = 0) -> Iterator[None]:
        """Count ``samples`` as in flight during the block, and do not be idle."""
        self.samples += samples
        self._calls += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.samples -= samples
            self._calls -= 1
            if self._calls == 0:
                self.idle.set()

    async def update(self, update: WeightUpdate) -> ActorUpdate:
        """Load ``update`` and serve it. Raises `WeightsGone` if it cannot be had."""
        with self.in_flight():
            if update.lent:
                try:
                    return await self._updated(update)
                except WeightsGone as gone:  # it is on another node, or the learner has died
                    log.info("%s: %s", self.name, gone)
            if self.name not in update.received:
                update = await self._late_weights.complete(update)
            return await self._updated(update)

    async def _updated(self, update: WeightUpdate) -> ActorUpdate:
        deadline, awaited = self._spec.group_deadline_s, f"weights {update.version}"
        done: ActorUpdate = await self._answer(self._handle.update.remote(update), awaited, deadline)
        self.version = done.version
        return done

    async def sleep(self) -> None:
        """Leave the device to the learner until `wake` or `update`. Samples under way, and new ones, wait."""
        with self.in_flight():
            await self._answer(self._handle.sleep.remote(), "to sleep", self._spec.hang_deadline_s)

    async def wake(self) -> None:
        """Generate again, with the weights it had."""
        with self.in_flight():
            await self._answer(self._handle.wake.remote(), "to wake up", self._spec.hang_deadline_s)

    async def join_weight_group(self, terms: WeightGroupTerms) -> None:
        """Let the engine receive weights from the learner directly; returns before it has joined."""
        awaited = f"to join weight group {terms.name}"
        await self._answer(self._handle.join_weight_group.remote(terms), awaited, terms.deadline_s)

    async def served_weights(self) -> NDArray[np.uint8]:
        """The weights it computes with, as a safetensors file with checkpoint names."""
        with self.in_flight():
            file: NDArray[np.uint8] = await self._answer(
                self._handle.served_weights.remote(), "served weights", self._spec.group_deadline_s
            )
        return file

    async def ping(self, seconds: float) -> None:
        """Wait until the actor and its engine have answered, at most ``seconds``."""
        await self._answer(self._handle.ping.remote(), "a sign of life", seconds)

    async def stop(self) -> None:
        """End the engine, then the actor."""
        stopping = asyncio.gather(self._handle.stop.remote(), return_exceptions=True)
        await asyncio.wait((stopping,), timeout=STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the actor at once, and its engine with it."""
        ray.kill(self._handle)
        shutil.rmtree(self._scratch, ignore_errors=True)  # a killed actor cannot; does nothing on other machines

    async def _answer(self, ref: Awaitable[_T], awaited: str, seconds: float) -> _T:
        try:
            async with asyncio.timeout(seconds):
                return await ref
        except TimeoutError as error:
            raise DeadlineExceeded("actor pool", f"{self.name}: {awaited}", seconds) from error
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise WorkerDied(self.name, death_cause(str(error)), last_lines(self._log)) from None
