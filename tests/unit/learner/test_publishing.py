"""What the storing thread holds back, and what it never does. The object store is a dictionary here."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.receiver import Receiver
from actors.weight_files import close_all
from learner import publishing
from learner.publishing import Publisher
from volley.errors import DeadlineExceeded, HostError
from volley.records import WeightUpdate
from volley.weight_group import WeightGroupTerms


class Store:
    """Copies what is put, as Ray does, once ``open`` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.full = False

    def put(self, arrays: tuple[Any, ...]) -> Any:
        assert self.open.wait(10)
        if self.full:
            raise HostError("the object store is full")
        return [array.copy() for array in arrays]

    def get(self, ref: Any, timeout: float) -> Any:
        return ref


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(publishing, "ray", made)
    return made


def tensors_of(update: WeightUpdate) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for bucket in update.buckets:
        file = np.concatenate(bucket.ref).tobytes()
        assert len(file) == bucket.nbytes
        out |= load(file)
    return out


def test_the_learner_goes_on_while_buckets_are_stored_and_weights_change_only_after(store: Store) -> None:
    publisher = Publisher(verify=True, deadline_s=10)
    weights = {"a": torch.ones(4), "b": torch.full((2, 2), 2.0), "c": torch.zeros(3)}
    store.open.clear()
    publisher.begin(7)
    for name, tensor in weights.items():
        publisher.add({name: tensor}, resident=True)
    publisher.end()
    threading.Timer(0.2, store.open.set).start()
    begun = time.monotonic()
    publisher.settle()
    assert time.monotonic() - begun > 0.15
    for tensor in weights.values():
        tensor += 1  # as the optimiser does
    update = publisher.update(7)
    assert {name: float(tensor.flatten()[0]) for name, tensor in tensors_of(update).items()} == {"a": 1, "b": 2, "c": 0}
    assert (update.version, update.received, update.lost_group) == (7, frozenset(), None)
    assert update.checksum is not None


def test_of_buckets_that_take_memory_one_waits_and_no_more(store: Store) -> None:
    publisher = Publisher(verify=False, deadline_s=10)
    store.open.clear()
    publisher.begin(1)
    publisher.add({"a": torch.ones(4)}, resident=False)
    threading.Timer(0.2, store.open.set).start()
    begun = time.monotonic()
    publisher.add({"b": torch.ones(4)}, resident=False)
    assert time.monotonic() - begun > 0.15
    publisher.end()
    assert tensors_of(publisher.update(1)).keys() == {"a", "b"}


def test_a_version_may_be_asked_for_while_the_next_is_published(store: Store) -> None:
    publisher = Publisher(verify=False, deadline_s=10)
    for version in (1, 2, 3):
        publisher.begin(version)
        publisher.add({"a": torch.full((2,), float(version))}, resident=True)
        publisher.end()
    assert [float(tensors_of(publisher.update(version))["a"][0]) for version in (2, 3)] == [2, 3]
    with pytest.raises(ValueError, match="version 1 is not being published"):
        publisher.update(1)


def test_what_storing_raises_comes_with_the_update(store: Store) -> None:
    publisher = Publisher(verify=False, deadline_s=10)
    store.full = True
    publisher.begin(1)
    publisher.add({"a": torch.ones(2)}, resident=False)
    publisher.end()
    publisher.settle()
    with pytest.raises(HostError, match="the object store is full"):
        publisher.update(1)
    store.full = False
    publisher.begin(2)
    publisher.add({"a": torch.ones(2)}, resident=False)
    publisher.end()
    assert publisher.update(2).version == 2


def test_a_store_that_hangs_is_an_error_within_the_deadline(store: Store) -> None:
    publisher = Publisher(verify=False, deadline_s=0.2)
    store.open.clear()
    publisher.begin(1)
    publisher.add({"a": torch.ones(2)}, resident=False)
    publisher.end()
    for call in (publisher.settle, lambda: publisher.update(1)):
        with pytest.raises(DeadlineExceeded, match=r"learner-0 waited 0\.2 s for weights 1 to be stored"):
            call()
    store.open.set()


def test_the_newest_weight_group_gets_what_is_stored_and_one_before_it_ends(store: Store) -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    publisher, receiver = Publisher(verify=True, deadline_s=30), Receiver(torch.device("cpu"))
    for name in ("1", "2", "3"):
        terms = WeightGroupTerms("127.0.0.1", server.port, name, (("actor-0", 1),), False, True, 10)
        receiver.join(terms, 1)
        assert publisher.join(terms)
        if name == "1":
            continue  # another is there before a version was sent
        version = int(name)
        publisher.begin(version)
        publisher.add({"a": torch.full((3,), float(version))}, resident=True)
        publisher.add({"b": torch.full((2, 2), float(version))}, resident=False)
        publisher.end()
        update = publisher.update(version)
        assert (update.received, update.lost_group) == (frozenset({"actor-0"}), None if name == "2" else "2")
        files = receiver.take(version)
        assert [file.read().tobytes() for file in files] == [bytes(np.concatenate(b.ref)) for b in update.buckets]
        close_all(files)
    ends = time.monotonic() + 10
    while (names := [each.name for each in threading.enumerate() if "weight-group" in each.name]) != ["weight-group-3"]:
        assert time.monotonic() < ends, names
        time.sleep(0.01)


def test_a_weight_group_that_is_not_formed_costs_nothing(store: Store) -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    publisher = Publisher(verify=False, deadline_s=30)
    terms = WeightGroupTerms("127.0.0.1", server.port, "1", (("actor-0", 1),), False, False, 0.2)
    assert not publisher.join(terms)
    publisher.begin(1)
    publisher.add({"a": torch.ones(2)}, resident=True)
    publisher.end()
    update = publisher.update(1)
    assert (len(update.buckets), update.received, update.lost_group) == (1, frozenset(), None)
