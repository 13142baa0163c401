"""The parts of a rank that need neither DeepSpeed nor Ray, with both replaced by small fakes."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from learner import rank_worker
from learner.checkpoint import text_parts, write_file
from learner.config import LearnerConfig
from learner.publishing import Publisher
from learner.rank_worker import RankWorker
from learner.weights import file_parts
from tests.unit.learner.test_publishing import Store, publisher_of, tensors_of
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
def no_engine_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines add one file to a checkpoint and read none."""
    monkeypatch.setattr(rank_worker, "engine_files", lambda *_, **__: iter([("policy.json", text_parts("{}"))]))
    monkeypatch.setattr(rank_worker, "load_engine", lambda *_, **__: None)


@pytest.mark.usefixtures("no_engine_files")
def test_a_checkpoint_restores_the_step_count_and_the_extra_data(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"steps_taken": 7, "extra": {"seen": 3}}))
    again = worker(tmp_path)
    assert again.load(tmp_path) == {"seen": 3}
    assert again.save(tmp_path, {"seen": 4}) == ""
    assert json.loads((tmp_path / "run.json").read_text()) == {"steps_taken": 7, "extra": {"seen": 4}}


FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "tokenizer.json"),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL)
def test_an_export_returns_that_the_disk_is_full(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(rank_worker, "export", export)
    assert worker(tmp_path).export(tmp_path) == str(error)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), SafetensorError("I/O error"), ValueError("no")])
def test_an_export_raises_any_other_error(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(rank_worker, "export", export)
    with pytest.raises(type(error)) as raised:
        worker(tmp_path).export(tmp_path)
    assert raised.value is error


@pytest.mark.usefixtures("no_engine_files")
def test_saving_returns_the_first_problem_and_does_not_raise(tmp_path: Path) -> None:
    assert "policy.json: " in worker(tmp_path).save(tmp_path / "missing", {})
    assert worker(tmp_path, rank=1).save(tmp_path, {}) == ""
    assert not (tmp_path / "run.json").exists(), "rank 0 alone writes it"
    (tmp_path / "run.json").mkdir()
    assert "run.json: " in worker(tmp_path).save(tmp_path, {})


@pytest.mark.usefixtures("no_engine_files")
def test_what_was_captured_is_written_as_it_was_then_as_often_as_needed(tmp_path: Path) -> None:
    one = worker(tmp_path)
    with pytest.raises(RuntimeError, match="nothing was captured"):
        one.write_captured(tmp_path)
    one.capture({"seen": 3})
    one._steps_taken = 9
    assert "policy.json: " in one.write_captured(tmp_path / "missing")
    assert one.write_captured(tmp_path) == ""
    assert json.loads((tmp_path / "run.json").read_text()) == {"steps_taken": 0, "extra": {"seen": 3}}
    one.drop_captured()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        one.write_captured(tmp_path)


def test_a_copy_of_the_state_takes_twelve_bytes_per_trained_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(tmp_path)
    monkeypatch.setattr(rank_worker, "total_memory", lambda: 10_000)
    monkeypatch.setattr(rank_worker, "peak_above_now", lambda: 500)  # on each of the two ranks
    spare = 1_000 + 2 * 500
    for more, room in ((-8, False), (8, True)):
        monkeypatch.setattr(rank_worker, "available_memory", lambda more=more: spare + 12 * 4 + more)
        assert one.has_room_for_checkpoint() is room
    one._engine.module.lm.weight.requires_grad = False
    monkeypatch.setattr(rank_worker, "available_memory", lambda: spare + 8)
    assert one.has_room_for_checkpoint()


def test_a_file_of_parts_is_one_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "none": torch.zeros(0, 2), "b": torch.arange(7, dtype=torch.bfloat16)}
    assert write_file(tmp_path / "x.safetensors", file_parts(tensors)) == ""
    read = load_file(tmp_path / "x.safetensors")
    assert {name: (each.dtype, each.tolist()) for name, each in read.items()} == {
        name: (each.dtype, each.tolist()) for name, each in tensors.items()
    }


def test_rank_0_publishes_the_trained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_worker, "gathered_views", dict)
    publisher = publisher_of(Store())
    first = worker(tmp_path, publisher=publisher)
    first.publish(3)
    update = first.published(3)
    assert update is not None
    (weight,) = tensors_of(update).values()
    assert torch.equal(weight, first._engine.module.lm.weight)
    other = worker(tmp_path, rank=1)
    other.publish(3)
    assert other.published(3) is None
    with pytest.raises(RuntimeError, match="only rank 0 publishes"):
        _ = other.publisher


def test_a_supervised_job_takes_no_reinforcement_steps(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="takes no reinforcement steps"):
        worker(tmp_path).step([], [], 0, Mean(), None)
