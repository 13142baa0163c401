"""What a rank sets before torch and DeepSpeed are imported."""

import os
from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerConfig
from learner.rank import _set_environment
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "DS_ACCELERATOR", "OMP_NUM_THREADS")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables are absent, and afterwards as they were."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def config(*, lends: bool = False, **learner: Any) -> LearnerConfig:
    model = ModelSpec(path=Path("model"))
    return LearnerConfig(model, LearnerSpec(**learner), Optimizer(), 1, 0, Path("logs"), lends=lends)


def test_on_a_gpu_memory_segments_grow_unless_the_user_says_otherwise(environment: pytest.MonkeyPatch) -> None:
    _set_environment(config(gpus_per_rank=0.6))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "DS_ACCELERATOR" not in os.environ
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    _set_environment(config(gpus_per_rank=1))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"


def test_memory_that_is_lent_has_segments_that_other_processes_can_open(environment: pytest.MonkeyPatch) -> None:
    _set_environment(config(gpus_per_rank=0.5, lends=True))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_without_gpus_deepspeed_is_told_not_to_look_for_any(environment: pytest.MonkeyPatch) -> None:
    _set_environment(config(threads_per_rank=3))
    assert {name: os.environ.get(name) for name in NAMES} == {
        "PYTORCH_CUDA_ALLOC_CONF": None,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "3",
    }
