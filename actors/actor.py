"""The Ray actor that owns one vLLM engine."""

import asyncio
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from ray import ObjectRef
from ray.exceptions import RayError

from actors import environment, prefork
from actors.columns import context_of, joined
from actors.config import ActorConfig, ActorInfo, ActorUpdate, GenerateRequest, Shown
from actors.weight_files import WeightFile, closing_all
from volley.checksum import weights_checksum
from volley.errors import GroupGone, HostError, WeightsGone
from volley.records import Group, GroupMeta, WeightUpdate
from volley.weight_group import WeightGroupTerms

if TYPE_CHECKING:
    from actors.adapters import Merger
    from actors.engine import Engine

FETCH_SECONDS = 60.0  # for one bucket of the weights


class Actor:
    """Made remote by the pool. All methods share one event loop: an update waits for no group in flight."""

    def __init__(self, config: ActorConfig, index: int, scratch: Path) -> None:
        self._started = time.perf_counter()
        self._scratch = scratch
        self._config, self._index, self._name = config, index, f"actor-{index}"
        self._log = log_path(config.log_dir, self._name)
        self._engine: Engine | None = None
        self._updating = asyncio.Lock()
        self._merger: Merger | None = None

    async def start(self) -> ActorInfo:
        """Start the engine; returns when it serves at full speed.

        Raises:
            JobError: the model does not load, or an engine option is not vLLM's.
        """
        self._scratch_lock = environment.enter(self._config.actors, self._log, self._scratch)
        if self._config.actors.gpus == 0:
            prefork.begin()
        from actors.engine import Engine  # imports vLLM, which reads the environment

        if self._config.actors.gpus == 0:
            prefork.use()
        self._engine = await Engine.start(self._config, self._index, self._name, self._log)
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
        """One group; call with ``num_returns=2`` so that its arrays stay in the object store."""
        group = await (
            self._running.generate(request) if request.after is None else self._go_on(request, request.after)
        )
        return group, group.meta()

    async def _go_on(self, request: GenerateRequest, after: Shown) -> Group:
        """Another turn of each sample that was shown something, all at once."""
        started = time.perf_counter()
        try:
            group: Group = await after.group
        except RayError as error:
            raise GroupGone(f"group {request.group_id}: {type(error).__name__}") from error

        async def turn(sample: int) -> Group | None:
            shown = after.tokens[sample]
            if shown is None or not group.stopped_n[sample]:  # one that was cut has said nothing that ends
                return None
            context = np.concatenate([context_of(group, sample), shown])
            seed = None if request.seed is None else (request.seed + sample) % 2**63
            return await self._running.generate(replace(request, prompt_p=context, n=1, seed=seed, after=None))

        turns = await asyncio.gather(*(turn(sample) for sample in range(group.n)))
        return joined(group, after, turns, actor=self._name, seconds=time.perf_counter() - started)

    async def update(self, update: WeightUpdate) -> ActorUpdate:
        """Serve ``update`` from here on; generation stands still only while the engine loads it.

        Raises:
            HostError: no memory for a second copy of the weights, or what was received is not what was published.
            WeightsGone: they are gone from the object store, or do not come out of it.
            JobError: there is an adapter of a matrix that the model has not.
        """
        async with self._updating:
            return await self._receive(update)

    async def join_weight_group(self, terms: WeightGroupTerms) -> None:
        """Have the engine take weights from the learner itself; returns before it has joined."""
        await self._running.join_weight_group(terms)

    async def _receive(self, update: WeightUpdate) -> ActorUpdate:
        started = time.perf_counter()
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

    async def _fetch(self, update: WeightUpdate, files: list[WeightFile]) -> None:
        for bucket in update.buckets:
            parts = await _fetch(bucket.ref, update.version)
            files.append(await asyncio.to_thread(WeightFile, *parts))
        if self._config.verify and update.checksum is not None:
            await asyncio.to_thread(_verify, update, files)

    def _merged(self, adapters: list[str], files: list[WeightFile]) -> list[str]:
        """Paths of ``files`` that are added here: the whole matrices which ``adapters`` change."""
        if self._merger is None:
            from actors.adapters import Merger  # imports torch

            self._merger = Merger(self._config.model)
        there = len(files)
        for file in self._merger.whole(adapters):
            files.append(WeightFile(file))
        return [file.path for file in files[there:]]

    async def served_weights(self) -> NDArray[np.uint8]:
        """The weights the engine computes with, as a safetensors file in checkpoint names."""
        with closing_all() as files:
            file = WeightFile()
            files.append(file)
            await self._running.save_served_weights(file.path)
            return file.read()

    async def ping(self) -> None:
        """Returns when the engine has answered."""
        await self._running.ping()

    async def stop(self) -> None:
        """End the engine and remove what it left. The caller then ends this process."""
        if self._engine is not None:
            await self._engine.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _running(self) -> "Engine":
        if self._engine is None:
            raise RuntimeError(f"{self._name} was not started")
        return self._engine


async def _fetch(ref: ObjectRef, version: int) -> tuple[NDArray[np.uint8], ...]:
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            parts: tuple[NDArray[np.uint8], ...] = await ref
    except RayError as error:
        raise WeightsGone(f"weights {version} are gone from the object store: {type(error).__name__}") from error
    except TimeoutError:  # seen after a node was killed: Ray goes on looking for an object that it has
        raise WeightsGone(f"weights {version}: a bucket did not come within {FETCH_SECONDS:g} s") from None
    return parts


def _verify(update: WeightUpdate, files: list[WeightFile]) -> None:
    received = weights_checksum(file.read() for file in files)
    if received != update.checksum:
        raise HostError(f"weights {update.version} arrived as {received}, published as {update.checksum}")


def log_path(log_dir: Path, name: str) -> Path:
    """Where an actor and its engine write."""
    return log_dir / f"{name}.log"
