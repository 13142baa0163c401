"""Learners of one and of two real ZeRO-3 ranks, started side by side once a module."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.group import LearnerGroup
from learner.records import ScoredGroup
from tests.learner_batches import random_group, scored
from tests.models import tiny_llama
from volley.job import ModelSpec
from volley.objectives import MaxAtK
from volley.records import Group, WeightUpdate
from volley.update import LearnerSpec, Optimizer, PolicyUpdate

VOCABULARY = 32768  # so large that a rank takes its log-probs in more chunks the more tokens it has
SHARDED = {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": True}
OBJECTIVE = MaxAtK(k=2)
UPDATE = PolicyUpdate(entropy_bonus=0.001)
OPTIMIZER = Optimizer(lr=2e-3, weight_decay=0.01)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, initializer_range=0.05)


def config(path: Path, folder: Path, ranks: int, **changes: Any) -> LearnerConfig:
    """A learner whose parameters are all really sharded, however small they are."""
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
) -> AsyncIterator[tuple[LearnerGroup, LearnerGroup]]:
    """One rank, and two that gather weights in small buckets."""
    one = LearnerGroup.start(config(model, tmp_path_factory.mktemp("one"), 1))
    two = LearnerGroup.start(config(model, tmp_path_factory.mktemp("two"), 2, learner={"bucket_mb": 0.05}))
    started = await asyncio.gather(one, two)
    yield started
    await asyncio.gather(*(each.stop() for each in started))


@pytest.fixture(scope="module")
async def whole(ray_local: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LearnerGroup]:
    """Two ranks that keep the parameters whole, as a model so small has it by default."""
    learner = await LearnerGroup.start(config(model, tmp_path_factory.mktemp("whole"), 2, learner={"deepspeed": {}}))
    yield learner
    await learner.stop()


def batch(step: int, *, groups: int = 5) -> tuple[list[Group], list[ScoredGroup]]:
    """Groups of unequal size for the step numbered ``step``, one sample of them unscored."""
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
    """Every published tensor by name."""
    from safetensors.numpy import load

    out: dict[str, NDArray[np.float32]] = {}
    for bucket in update.buckets:
        out |= load(b"".join(part.tobytes() for part in ray.get(bucket.ref)))
    return out


def assert_near(mine: dict[str, NDArray[np.float32]], theirs: dict[str, NDArray[np.float32]]) -> None:
    """Equal up to what another order of float32 sums changes. Adam's first steps are near sign(gradient) * lr, so
    an element whose gradient is no more than rounding noise may differ by a good part of lr; those are few."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        gap = np.abs(tensor - theirs[name])
        assert np.quantile(gap, 0.999) < 2e-5, name
        assert gap.max() < 5e-3, name


def same(mine: dict[str, NDArray[np.float32]], theirs: dict[str, NDArray[np.float32]]) -> bool:
    """Equal to the bit?"""
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
