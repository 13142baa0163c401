"""The Ray actor that owns one vLLM engine."""

import asyncio
import contextlib
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from actors import environment, prefork
from actors.columns import context_of, joined
from actors.config import (
    ActorConfig,
    ActorInfo,
    ActorUpdate,
    EpisodesRequest,
    GenerateRequest,
    Observation,
    OpenedSessions,
)
from actors.gateway.groups import EpisodeReport
from actors.uncompiled import uncompiled
from volley.checksum import weights_checksum
from volley.errors import GroupGone, HostError, WeightsGone
from volley.imports import without_collection
from volley.records import Group, GroupMeta, WeightUpdate
from volley.refs import Ref
from volley.weight_files import WeightFile, closing_all, opened
from volley.weight_group import WeightGroupTerms

if TYPE_CHECKING:
    from actors.adapters import Merger
    from actors.engine import Engine
    from actors.gateway.served import ServedGateway

FETCH_SECONDS = 60.0  # limit for one bucket of the weights


class Actor:
    """The pool makes it remote. All methods run on one event loop, so an update does not wait for groups in flight."""

    def __init__(self, config: ActorConfig, index: int, scratch: Path) -> None:
        self._started = time.perf_counter()
        self._scratch = scratch
        self._scratch_lock: int | None = None
        self._config, self._index, self._name = config, index, f"actor-{index}"
        self._log = log_path(config.log_dir, self._name)
        self._engine: Engine | None = None
        self._updating = asyncio.Lock()
        self._merger: Merger | None = None
        self._gateway: ServedGateway | None = None

    async def start(self) -> ActorInfo:
        """Start the engine and wait until it serves at full speed.

        Raises:
            JobError: the model does not load, or vLLM does not have an engine option or a parser.
        """
        self._scratch_lock = environment.enter(self._config.actors, self._log, self._scratch)
        on_cpu = self._config.actors.gpus == 0
        if on_cpu:
            prefork.begin(self._config.actors)
        with without_collection():
            with uncompiled() if on_cpu else contextlib.nullcontext():
                from actors.engine import Engine  # imports vLLM, which reads the environment

            if on_cpu:
                prefork.use()
            self._engine = await Engine.start(self._config, self._index, self._name, self._log)
            if self._config.gateway is not None:
                from actors.gateway.served import ServedGateway

                model = self._config.model.name
                self._gateway = ServedGateway(self._engine, self._config.gateway, model, ray.util.get_node_ip_address())
        return ActorInfo(
            name=self._name,
            pid=os.getpid(),
            engine_pids=self._engine.pids,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            model_processes=self._engine.model_processes,
            start_seconds=time.perf_counter() - self._started,
        )

    async def generate(self, request: GenerateRequest) -> tuple[Group, GroupMeta]:
        """Generate a group. Call with ``num_returns=2``, so that its arrays stay in the object store."""
        group = await (
            self._running.generate(request) if request.after is None else self._next_turn(request, request.after)
        )
        return group, group.meta()

    async def _next_turn(self, request: GenerateRequest, after: Observation) -> Group:
        """Generate one more turn of every sample with an observation, all at once."""
        started = time.perf_counter()
        try:
            group: Group = await after.group
        except RayError as error:
            raise GroupGone(f"group {request.group_id}: {type(error).__name__}") from error

        async def turn(sample: int) -> Group | None:
            observation = after.tokens[sample]
            if observation is None or not group.stopped_n[sample]:  # a sample cut at the length limit has ended
                return None
            context = np.concatenate([context_of(group, sample), observation])
            seed = None if request.seed is None else (request.seed + sample) % 2**63
            return await self._running.generate(replace(request, prompt_p=context, n=1, seed=seed, after=None))

        turns = await asyncio.gather(*(turn(sample) for sample in range(group.n)))
        return joined(group, after, turns, actor=self._name, seconds=time.perf_counter() - started)

    async def open_sessions(self, request: EpisodesRequest) -> OpenedSessions:
        """Open the gateway's sessions for the episodes of a group."""
        return self._episodes.open(request)

    async def close_sessions(
        self, request: EpisodesRequest, opened: OpenedSessions
    ) -> tuple[Group, tuple[GroupMeta, tuple[EpisodeReport, ...]]]:
        """End the sessions and return what they recorded. Call with ``num_returns=2``, as `generate`."""
        group, reports = await self._episodes.close(request, opened, self._name)
        return group, (group.meta(), reports)

    async def update(self, update: WeightUpdate) -> ActorUpdate:
        """Load ``update`` and serve it. Generation pauses only while the engine loads.

        Raises:
            HostError: no memory for a second copy of the weights, or the received weights fail verification.
            WeightsGone: the object store lost the weights, or does not deliver them.
            JobError: an adapter belongs to a matrix that the model does not have.
        """
        async with self._updating:
            return await self._receive(update)

    async def sleep(self) -> None:
        """Leave the device to the learner until `wake` or `update`. Samples under way, and new ones, wait."""
        async with self._updating:
            await self._running.sleep()

    async def wake(self) -> None:
        """Generate again, with the weights it had."""
        async with self._updating:
            await self._running.wake()

    async def join_weight_group(self, terms: WeightGroupTerms) -> None:
        """Let the engine receive weights from the learner directly; returns before it has joined."""
        await self._running.join_weight_group(terms)

    async def _receive(self, update: WeightUpdate) -> ActorUpdate:
        started = time.perf_counter()
        if update.lent:
            return await self._borrow(update)
        grouped = self._name in update.received
        with closing_all() as files:
            if not grouped:
                await self._fetch(update, files)
            paths = [file.path for file in files]
            if self._config.model.lora is not None:
                paths = await asyncio.to_thread(self._merged, paths, files)
            fetched = time.perf_counter()
            stall, load = await self._running.load(update.version, paths)
        return ActorUpdate(self._name, update.version, update.nbytes, fetched - started, load, stall, grouped)

    async def _borrow(self, update: WeightUpdate) -> ActorUpdate:
        """Load ``update`` from the learner's memory, and sleep on."""
        if update.lender != ray.get_runtime_context().get_node_id():
            raise WeightsGone(f"weights {update.version} are lent on another node")
        with contextlib.ExitStack() as stack:
            try:
                paths = stack.enter_context(opened([bucket.lent for bucket in update.buckets]))
            except OSError as error:
                raise WeightsGone(f"weights {update.version} are no longer lent: {error.strerror}") from error
            stall, load = await self._running.load(update.version, paths, lent=True)
        return ActorUpdate(self._name, update.version, update.nbytes, 0.0, load, stall)

    async def _fetch(self, update: WeightUpdate, files: list[WeightFile]) -> None:
        for bucket in update.buckets:
            if bucket.ref is None:
                raise WeightsGone(f"weights {update.version} are not in the object store")
            parts = await _fetch(bucket.ref, update.version)
            files.append(await asyncio.to_thread(WeightFile, *parts))
        if self._config.verify and update.checksum is not None:
            await asyncio.to_thread(_verify, update, files)

    def _merged(self, adapters: list[str], files: list[WeightFile]) -> list[str]:
        """Append the full matrices that ``adapters`` change to ``files``; returns the paths of these."""
        if self._merger is None:
            from actors.adapters import Merger  # imports torch

            self._merger = Merger(self._config.model)
        before = len(files)
        for file in self._merger.full_matrices(adapters):
            files.append(WeightFile(file))
        return [file.path for file in files[before:]]

    async def served_weights(self) -> NDArray[np.uint8]:
        """The weights the engine computes with, as a safetensors file with checkpoint names."""
        with closing_all() as files:
            file = WeightFile()
            files.append(file)
            await self._running.save_served_weights(file.path)
            return file.read()

    async def ping(self) -> None:
        """Wait for an answer from the engine."""
        await self._running.ping()

    async def stop(self) -> None:
        """End the engine and remove its scratch folder. The caller then ends this process."""
        if self._gateway is not None:
            await self._gateway.stop()
        if self._engine is not None:
            await self._engine.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _running(self) -> "Engine":
        if self._engine is None:
            raise RuntimeError(f"{self._name} was not started")
        return self._engine

    @property
    def _episodes(self) -> "ServedGateway":
        if self._gateway is None:
            raise RuntimeError(f"{self._name} was started without a gateway")
        return self._gateway


async def _fetch(ref: Ref[tuple[NDArray[np.uint8], ...]], version: int) -> tuple[NDArray[np.uint8], ...]:
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            return await ref
    except RayError as error:
        raise WeightsGone(f"weights {version} are gone from the object store: {type(error).__name__}") from error
    except TimeoutError:  # happens after a node was killed: Ray keeps looking for an object that another node has
        raise WeightsGone(f"weights {version}: a bucket did not arrive within {FETCH_SECONDS:g} s") from None


def _verify(update: WeightUpdate, files: list[WeightFile]) -> None:
    received = weights_checksum(file.read() for file in files)
    if received != update.checksum:
        raise HostError(f"weights {update.version} have checksum {received}, but were published as {update.checksum}")


def log_path(log_dir: Path, name: str) -> Path:
    """The log file of an actor and its engine."""
    return log_dir / f"{name}.log"
