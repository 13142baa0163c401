"""Measures the stages: the learner's step and its publishing without Ray, the actor's engine without its pool."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.config import ActorConfig, GenerateRequest
from benchmarks.plan.models import PROMPT, VOCABULARY, Work, job_of

P = ParamSpec("P")
R = TypeVar("R")
SECONDS = 300  # limit of a measurement


@dataclass(frozen=True, slots=True)
class Learned:
    """CPU seconds of a step and of storing a version, on one thread, and the sample tokens of the step."""

    step: float
    store: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Generated:
    """Seconds per token step of an engine for each number of samples, and of loading a version.

    Attributes:
        tokens_per_second: with the largest number of samples.
    """

    steps: dict[int, float]
    tokens_per_second: float
    load: float


def in_own_process(call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Call a function in a fresh process with one thread: DeepSpeed and vLLM change the process that they run in.

    Raises:
        TimeoutError: it took longer than `SECONDS`, and was ended.
    """
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        future = pool.submit(call, *arguments, **options)
        try:
            return future.result(SECONDS)
        except TimeoutError:
            for process in pool._processes.values():
                process.kill()  # the pool would wait for it
            raise


class CopyingStore:
    """Copies what is put into it to new memory, as Ray's object store does."""

    def __init__(self) -> None:
        self.kept: list[NDArray[np.uint8]] = []

    def put(self, value: tuple[NDArray[np.uint8], ...], /) -> "CopyingStore":
        self.kept = [each.copy() for each in value]
        return self


def learn(model: Path, work: Work, logs: Path) -> Learned:
    """Take steps on one rank, and publish after each."""
    import torch

    from learner.config import LearnerConfig
    from learner.engine import open_store
    from learner.rank_worker import RankWorker
    from tests.learner_batches import random_group, scored
    from volley.update import Optimizer

    torch.set_num_threads(1)
    job = job_of(model, work)
    config = LearnerConfig(
        model=job.model,
        learner=job.learner,
        optimizer=Optimizer(lr=1e-6),
        steps=1000,
        seed=0,
        log_dir=logs,
        update=job.update,
        objective=job.objective,
    )
    store = open_store("127.0.0.1", 0, 1)
    worker = RankWorker.start(config, 0, store, object_store=CopyingStore())  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    prompt, length = (PROMPT, PROMPT + 1), (work.tokens, work.tokens + 1)  # half open
    groups = [
        random_group(rng, i, n=work.n, vocabulary=VOCABULARY, prompt=prompt, length=length) for i in range(work.groups)
    ]
    columns = [scored(group, [float(i % 2) for i in range(work.n)]) for group in groups]
    steps, stores = [], []
    for turn in range(work.turns + 1):  # the first is a warm-up
        begun = time.process_time()
        worker.step(columns, groups, 0, job.objective, None)
        stepped = time.process_time()
        worker.publish(turn)
        worker.publisher.update(turn)
        steps.append(stepped - begun)
        stores.append(time.process_time() - stepped)
    return Learned(median(steps[1:]), median(stores[1:]), sum(len(group.tokens_T) for group in groups))


def generate(model: Path, work: Work, logs: Path, numbers: tuple[int, ...]) -> Generated:
    """Time an engine with each of ``numbers`` samples at once, and loading weights into it."""
    from actors import environment

    job = job_of(model, work)
    config = ActorConfig(job.model, job.actors, PROMPT + work.tokens + 1, 0, logs)
    environment.enter(job.actors, logs / f"{model.name}.log", logs)
    return asyncio.run(_timed(config, work, numbers, model / "model.safetensors"))


async def _timed(config: ActorConfig, work: Work, numbers: tuple[int, ...], weights: Path) -> Generated:
    from actors.uncompiled import uncompiled
    from volley.weight_files import WeightFile

    with uncompiled():
        from actors.engine import Engine

        engine = await Engine.start(config, 0, "actor-0", config.log_dir / "engine.log")
    rng, count = np.random.default_rng(0), iter(range(1 << 30))

    async def samples(number: int) -> tuple[float, int]:
        """Seconds and tokens of ``number`` samples, in groups of at most ``work.n``."""
        sizes = [min(work.n, number - begun) for begun in range(0, number, work.n)]
        requests = []
        for size in sizes:
            prompt_p = rng.integers(3, VOCABULARY, PROMPT).astype(np.int32)
            requests.append(GenerateRequest(next(count), "p", prompt_p, size, 1.0, 1.0, work.tokens))
        begun = time.perf_counter()
        groups = await asyncio.gather(*map(engine.generate, requests))
        return time.perf_counter() - begun, sum(len(group.tokens_T) for group in groups)

    async def load(version: int) -> float:
        content = np.fromfile(weights, dtype=np.uint8)
        begun = time.perf_counter()
        file = WeightFile(content)
        await engine.load(version, [file.path])
        file.close()
        return time.perf_counter() - begun

    await samples(max(numbers))  # a warm-up
    turns = {number: [await samples(number) for _ in range(work.turns)] for number in numbers}
    loads = [await load(version) for version in range(1, 4 * work.turns + 2)][1:]
    await engine.stop()
    rate = median(tokens / seconds for seconds, tokens in turns[max(numbers)])
    steps = {number: median(seconds for seconds, _ in each) / work.tokens for number, each in turns.items()}
    return Generated(steps, rate, median(loads))
