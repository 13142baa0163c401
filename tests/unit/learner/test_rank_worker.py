"""The parts of a rank that need neither DeepSpeed nor Ray, with both replaced by small fakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learner import rank_worker
from learner.config import LearnerConfig
from learner.publishing import Publisher
from learner.rank_worker import RankWorker
from tests.unit.learner.test_publishing import Store, tensors_of
from volley.model import ModelSpec
from volley.objectives import Mean
from volley.update import LearnerSpec, Optimizer


class FakeEngine:
    """A policy of one matrix."""

    def __init__(self) -> None:
        self.module = nn.Module()
        self.module.lm = nn.Linear(2, 2, bias=False)


def worker(folder: Path, rank: int = 0, publisher: Publisher | None = None) -> RankWorker:
    config = LearnerConfig(ModelSpec(path=folder), LearnerSpec(ranks=2), Optimizer(), 1, 0, folder)
    engine: Any = FakeEngine()
    pack: Any = None
    return RankWorker(config, rank, engine, pack, publisher=publisher)


@pytest.fixture
def engine_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Problems that saving an engine reports; nothing is written or read."""
    problems: list[str] = []
    monkeypatch.setattr(rank_worker, "save_engine", lambda *_, **__: next(iter(problems), ""))
    monkeypatch.setattr(rank_worker, "load_engine", lambda *_, **__: None)
    return problems


def test_a_checkpoint_restores_the_step_count_and_the_extra_data(tmp_path: Path, engine_files: list[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"steps_taken": 7, "extra": {"seen": 3}}))
    again = worker(tmp_path)
    assert again.load(tmp_path) == {"seen": 3}
    assert again.save(tmp_path, {"seen": 4}) == ""
    assert json.loads((tmp_path / "run.json").read_text()) == {"steps_taken": 7, "extra": {"seen": 4}}


def test_saving_returns_the_first_problem_and_does_not_raise(tmp_path: Path, engine_files: list[str]) -> None:
    assert "run.json" in worker(tmp_path).save(tmp_path / "missing", {})
    assert worker(tmp_path, rank=1).save(tmp_path / "missing", {}) == ""  # rank 0 alone writes run.json
    engine_files.append("policy-00000.safetensors: No space left on device")
    assert worker(tmp_path, rank=1).save(tmp_path, {}) == engine_files[0]


def test_rank_0_publishes_the_trained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_worker, "gathered_views", dict)
    publisher = Publisher(Store(), verify=False, deadline_s=10)
    first = worker(tmp_path, publisher=publisher)
    first.publish(3)
    (weight,) = tensors_of(first.publisher.update(3)).values()
    assert torch.equal(weight, first._engine.module.lm.weight)
    other = worker(tmp_path, rank=1)
    other.publish(3)
    with pytest.raises(RuntimeError, match="only rank 0 publishes"):
        _ = other.publisher


def test_a_supervised_job_takes_no_reinforcement_steps(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="takes no reinforcement steps"):
        worker(tmp_path).step([], [], 0, Mean(), None)
