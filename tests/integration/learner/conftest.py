"""Learners with one and with two real ZeRO-3 ranks, started once per module."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.pool import LearnerPool
from learner.records import ScoredGroup
from tests.integration.processes import wait_until_gone
from tests.learner_batches import random_group, scored
from tests.models import tiny_llama
from volley.model import ModelSpec
from volley.objectives import MaxAtK
from volley.records import Group, WeightUpdate
from volley.update import LearnerSpec, Optimizer, PolicyUpdate

VOCABULARY = 32768  # large enough that the number of log-prob chunks grows with a rank's tokens
SHARDED = {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": True}
OBJECTIVE = MaxAtK(k=2)
UPDATE = PolicyUpdate(entropy_bonus=0.001)
OPTIMIZER = Optimizer(lr=2e-3, weight_decay=0.01)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, initializer_range=0.05)


def config(path: Path, folder: Path, ranks: int, **changes: Any) -> LearnerConfig:
    """A learner that really shards all its parameters, even small ones."""
    spec: dict[str, Any] = {
        "ranks": ranks,
        "verify_weights": True,
        "step_deadline_s": 60,
        "deepspeed": {"zero_optimization": SHARDED},
        **changes.pop("learner", {}),
    }
    values: dict[str, Any] = {
        "model": ModelSpec(path=path),
        "learner": LearnerSpec.model_validate(spec),
        "optimizer": OPTIMIZER,
        "steps": 10,
        "seed": 0,
        "log_dir": folder / "logs",
        "update": UPDATE,
        "objective": OBJECTIVE,
        "ks": (1, 2),
        "prefix": f"{folder.name}-",
        **changes,
    }
    return LearnerConfig(**values)


@pytest.fixture(scope="module")
async def learners(
    ray_local: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[LearnerPool, LearnerPool]]:
    """A learner with one rank, and one with two ranks that gathers weights in small buckets."""
    one = LearnerPool.start(config(model, tmp_path_factory.mktemp("one"), 1))
    two = LearnerPool.start(config(model, tmp_path_factory.mktemp("two"), 2, learner={"bucket_mb": 0.05}))
    started = await asyncio.gather(one, two)
    yield started
    await asyncio.gather(*(each.stop() for each in started))


@pytest.fixture(scope="module")
async def whole(ray_local: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LearnerPool]:
    """Two ranks that do not shard the parameters, the default for small models."""
    learner = await LearnerPool.start(config(model, tmp_path_factory.mktemp("whole"), 2, learner={"deepspeed": {}}))
    yield learner
    await learner.stop()


@contextlib.asynccontextmanager
async def rank_stopped(learner: LearnerPool, number: int = signal.SIGSTOP) -> AsyncIterator[None]:
    """Stop (or kill) the learner's second rank before the block, and end the learner after it: no process is left."""
    pids = {process.pid for process in learner._ranks.processes}
    os.kill(learner._ranks.processes[1].pid, number)
    try:
        yield
    finally:
        await learner.stop()
    await asyncio.to_thread(wait_until_gone, pids)


async def save(learner: LearnerPool, folder: Path, extra: dict[str, Any], *, background: bool = True) -> None:
    """Take a checkpoint and wait until it is stored."""
    await learner.begin_save(folder, extra, background=background)
    await learner.saved()


def batch(step: int, *, groups: int = 5) -> tuple[list[Group], list[ScoredGroup]]:
    """Groups of unequal size for step ``step``, with one unscored sample."""
    rng = np.random.default_rng(step)
    made = [
        random_group(rng, 100 * step + i, vocabulary=VOCABULARY, version=step, length=(1, 4 + 24 * i))
        for i in range(groups)
    ]
    columns = []
    for i, group in enumerate(made):
        valid = [True] * group.n
        valid[0] = i != 1
        rewards = rng.integers(0, 3, group.n).astype(float).tolist()
        columns.append(scored(group, rewards, valid_n=valid, reference=ray.put(group)))
    return made, columns


def tensors_of(update: WeightUpdate) -> dict[str, NDArray[np.float32]]:
    """All published tensors by name."""
    from safetensors.numpy import load

    out: dict[str, NDArray[np.float32]] = {}
    for bucket in update.buckets:
        out |= load(b"".join(part.tobytes() for part in ray.get(bucket.ref)))
    return out


def assert_near(mine: dict[str, NDArray[np.float32]], theirs: dict[str, NDArray[np.float32]]) -> None:
    """Assert equality up to the order of float32 sums. Adam's first steps are near sign(gradient) * lr, so the few
    elements whose gradient is only rounding noise may differ by a large part of lr.
    """
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        gap = np.abs(tensor - theirs[name])
        assert np.quantile(gap, 0.999) < 2e-5, name
        assert gap.max() < 5e-3, name


def same(mine: dict[str, NDArray[np.float32]], theirs: dict[str, NDArray[np.float32]]) -> bool:
    """Whether the tensors are bitwise equal."""
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
