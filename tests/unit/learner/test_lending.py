"""Versions that are lent to engines on the same device, as files in memory on CPU."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from learner.lending import LentBucket
from learner.publishing import Publisher, Source
from learner.staging import Staging
from tests.unit.learner.test_publishing import Store, tensors_of
from volley.errors import WeightsGone
from volley.records import WeightUpdate


@pytest.fixture
def store() -> Store:
    return Store()


def lender(store: Store) -> Publisher:
    return Publisher(store, verify=True, deadline_s=10, staging=Staging(torch.device("cpu"), 1), lends=True)


def lent(publisher: Publisher, version: int, weights: dict[str, torch.Tensor]) -> WeightUpdate:
    publisher.begin(version)
    for name, tensor in weights.items():
        publisher.add(partial(dict, {name: tensor}), Source.WEIGHTS)
    publisher.end()
    publisher.settle()
    return publisher.update(version)


def memory_files() -> int:
    return sum(
        "volley-weights" in str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
    )


def read(update: WeightUpdate) -> dict[str, torch.Tensor]:
    """As an engine's process reads it."""
    out: dict[str, torch.Tensor] = {}
    for bucket in update.buckets:
        out |= load(Path(bucket.lent).read_bytes())
    return out


def test_engines_read_each_version_and_nothing_is_stored(store: Store) -> None:
    publisher = lender(store)
    weights = {"a": torch.ones(3), "b": torch.full((2, 2), 2.0, dtype=torch.bfloat16)}
    for version in (1, 2):
        update = lent(publisher, version, weights)
        assert (update.lent, update.stored, update.checksum) == (True, False, None)
        assert update.nbytes == 3 * 4 + 4 * 2
        before = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            tensor += 1  # the optimiser's next step
        found = read(update)
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in before)
    assert store.puts == 0


def test_the_files_are_closed_when_the_next_version_begins_also_if_it_is_the_same(store: Store) -> None:
    publisher, before = lender(store), memory_files()
    for version in (0, 1, 1, 2):
        second = lent(publisher, version, {"a": torch.ones(3), "b": torch.ones(2)})
        assert memory_files() == before + 2
    with pytest.raises(WeightsGone, match="does not have weights 1 any longer"):
        publisher.store(1)
    assert read(second)


def test_an_actor_that_starts_later_gets_the_version_from_the_object_store(store: Store) -> None:
    publisher, weight = lender(store), torch.ones(3)
    update = lent(publisher, 1, {"a": weight})
    weight += 1
    stored = publisher.store(1)
    assert (stored.stored, stored.lent) == (True, False)
    assert tensors_of(stored)["a"].tolist() == [1, 1, 1]
    assert torch.equal(read(update)["a"], torch.ones(3)), "engines on the learner's node may be reading it still"
    assert publisher.store(1) == stored
    assert store.puts == 1
    assert not update.taken_back().lent


def test_weights_that_are_lent_in_place_cannot_be_stored_once_they_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a loan is no copy."""
    monkeypatch.setattr(LentBucket, "copied", property(lambda _: False, lambda *_: None), raising=False)
    monkeypatch.setattr("learner.lending.header_of", lambda tensors: np.zeros(8, dtype=np.uint8))
    publisher, weight = lender(store), torch.ones(3)
    lent(publisher, 1, {"a": weight})
    assert tensors_of(publisher.store(1))["a"].tolist() == [1, 1, 1]
    lent(publisher, 2, {"a": weight})
    publisher.leave_device()
    weight += 1
    with pytest.raises(WeightsGone, match="weights 2 were replaced"):
        publisher.store(2)
