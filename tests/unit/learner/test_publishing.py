"""What waits for the storing thread and what does not. A small class replaces Ray's object store."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from learner import contributor as contributing
from learner.contributor import Contributor
from learner.publishing import BETWEEN, ObjectStore, Publisher, Source
from learner.staging import Staging
from volley.errors import DeadlineExceeded, HostError
from volley.records import WeightBucket, WeightUpdate


class Store:
    """Copies what is put, as Ray does, but only after ``open`` is set."""

    def __init__(self) -> None:
        self.puts = 0
        self.open = threading.Event()
        self.open.set()
        self.full = False

    def put(self, arrays: tuple[Any, ...]) -> Any:
        assert self.open.wait(10)
        if self.full:
            raise HostError("the object store is full")
        self.puts += 1
        return [array.copy() for array in arrays]

    def get(self, ref: Any, timeout: float) -> Any:
        return ref


@pytest.fixture
def store() -> Store:
    return Store()


def publisher_of(store: ObjectStore, *, verify: bool = False, deadline_s: float = 10) -> Publisher:
    return Publisher(store, verify=verify, deadline_s=deadline_s, staging=Staging(torch.device("cpu"), 64))


def tensors_of(update: WeightUpdate) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for bucket in update.buckets:
        file = file_of(bucket)
        assert len(file) == bucket.nbytes
        out |= load(file)
    return out


def file_of(bucket: WeightBucket) -> bytes:
    arrays: Any = bucket.ref  # what `Store.put` returned
    return bytes(np.concatenate(arrays))


def waits_for(call: Callable[[], object], opened: threading.Event) -> bool:
    """Make the call, and open a little later; returns whether the call waited for that."""
    order: list[str] = []

    def open_it() -> None:
        order.append("opened")
        opened.set()

    threading.Timer(0.1, open_it).start()
    call()
    order.append("returned")
    return order == ["opened", "returned"]


def test_settle_waits_until_weights_in_place_are_stored(store: Store) -> None:
    publisher = publisher_of(store, verify=True)
    weights = {"a": torch.ones(4), "b": torch.full((2, 2), 2.0), "c": torch.zeros(3)}
    store.open.clear()
    publisher.begin(7)
    for name, tensor in weights.items():
        publisher.add(partial(dict, {name: tensor}), Source.WEIGHTS)
    publisher.end()
    assert waits_for(publisher.settle, store.open)
    for tensor in weights.values():
        tensor += 1  # in place, like the optimiser
    update = publisher.update(7)
    assert {name: float(tensor.flatten()[0]) for name, tensor in tensors_of(update).items()} == {"a": 1, "b": 2, "c": 0}
    assert (update.version, update.received, update.lost_group) == (7, frozenset(), None)
    assert update.stored
    assert update.checksum is not None


def test_settle_does_not_wait_for_what_is_stored_from_other_memory(store: Store) -> None:
    publisher = publisher_of(store)
    weight = torch.ones(4)
    store.open.clear()
    publisher.begin(1)
    publisher.add(lambda: {"a": weight.clone()}, Source.ON_DEMAND)
    publisher.end()
    publisher.settle()
    weight += 1
    store.open.set()
    assert tensors_of(publisher.update(1))["a"].tolist() == [1] * 4


def test_only_one_bucket_with_extra_memory_waits_to_be_fetched(store: Store) -> None:
    publisher, fetched = publisher_of(store), threading.Event()
    publisher.begin(1)
    publisher.add(partial(named_after, fetched, "a"), Source.GATHERED)
    assert waits_for(lambda: publisher.add(partial(gather, "b", []), Source.GATHERED), fetched)
    publisher.end()
    assert tensors_of(publisher.update(1)).keys() == {"a", "b"}


def test_buckets_are_fetched_only_as_fast_as_they_are_stored(store: Store) -> None:
    publisher = publisher_of(store)
    store.open.clear()
    publisher.begin(1)
    gathered: list[str] = []
    for name in "abcde":
        publisher.add(partial(gather, name, gathered), Source.ON_DEMAND)
    publisher.end()
    until(lambda: len(gathered) == BETWEEN)
    time.sleep(0.05)
    assert gathered == [*"ab"]
    store.open.set()
    assert tensors_of(publisher.update(1)).keys() == {*"abcde"}
    assert gathered == [*"abcde"]


def gather(name: str, gathered: list[str]) -> dict[str, Tensor]:
    gathered.append(name)
    return {name: torch.ones(4)}


def named_after(opened: threading.Event, name: str) -> dict[str, Tensor]:
    assert opened.wait(10)
    return {name: torch.ones(4)}


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_the_optimiser_waits_for_shards_on_their_way_to_the_first_rank() -> None:
    contributor, opened = Contributor("learner-1", 10), threading.Event()
    contributor.settle()  # nothing was begun
    contributor.begin(1)
    contributor.add(partial(sent_after, opened))
    assert waits_for(contributor.settle, opened)


def test_shards_that_are_not_sent_are_an_error() -> None:
    contributor, opened = Contributor("learner-1", 0.2), threading.Event()
    contributor.begin(3)
    contributor.add(partial(sent_after, opened))
    with pytest.raises(DeadlineExceeded, match=r"learner-1 waited 0\.2 s for shards of weights 3 to be sent"):
        contributor.settle()
    opened.set()
    contributor = Contributor("learner-1", 10)
    contributor.begin(4)
    contributor.add(closed)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        contributor.settle()


def test_a_wait_for_one_version_does_not_become_one_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's own thread begins the next version while another one still looks at this one's shards."""
    contributor, opened = Contributor("learner-1", 10), threading.Event()
    contributor.begin(1)
    contributor.add(dict)

    def wait_and_begin_the_next(*arguments: Any) -> Any:
        waited = wait(*arguments)
        monkeypatch.undo()
        contributor.begin(2)
        contributor.add(partial(sent_after, opened))
        return waited

    monkeypatch.setattr(contributing, "wait", wait_and_begin_the_next)
    contributor.settle()
    opened.set()
    contributor.settle()


def sent_after(opened: threading.Event) -> dict[str, Tensor]:
    assert opened.wait(10)
    return {}


def closed() -> dict[str, Tensor]:
    raise RuntimeError("Connection closed by peer")


def test_a_version_is_available_while_the_next_is_published(store: Store) -> None:
    publisher = publisher_of(store)
    for version in (1, 2, 3):
        publisher.begin(version)
        publisher.add(partial(dict, {"a": torch.full((2,), float(version))}), Source.WEIGHTS)
        publisher.end()
    assert [float(tensors_of(publisher.update(version))["a"][0]) for version in (2, 3)] == [2, 3]
    with pytest.raises(ValueError, match="version 1 is not being published"):
        publisher.update(1)


def test_update_raises_the_error_of_storing(store: Store) -> None:
    publisher = publisher_of(store)
    store.full = True
    publisher.begin(1)
    publisher.add(partial(dict, {"a": torch.ones(2)}), Source.GATHERED)
    publisher.end()
    publisher.settle()
    with pytest.raises(HostError, match="the object store is full"):
        publisher.update(1)
    store.full = False
    publisher.begin(2)
    publisher.add(partial(dict, {"a": torch.ones(2)}), Source.GATHERED)
    publisher.end()
    assert publisher.update(2).version == 2


def test_a_hung_object_store_is_an_error_at_the_deadline(store: Store) -> None:
    publisher = publisher_of(store, deadline_s=0.2)
    store.open.clear()
    publisher.begin(1)
    publisher.add(partial(dict, {"a": torch.ones(2)}), Source.WEIGHTS)
    publisher.end()
    for call in (publisher.settle, lambda: publisher.update(1)):
        with pytest.raises(DeadlineExceeded, match=r"learner-0 waited 0\.2 s for weights 1 to be stored"):
            call()
    store.open.set()
