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
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.receiver import Receiver
from actors.weight_files import close_all
from learner import publishing
from learner.publishing import Contributor, Publisher
from volley.errors import DeadlineExceeded, HostError
from volley.records import WeightBucket, WeightUpdate
from volley.weight_group import WeightGroupTerms


class Store:
    """Copies what is put, as Ray does, but only after ``open`` is set."""

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
def store() -> Store:
    return Store()


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


def test_settle_waits_until_all_buckets_are_stored(store: Store) -> None:
    publisher = Publisher(store, verify=True, deadline_s=10)
    weights = {"a": torch.ones(4), "b": torch.full((2, 2), 2.0), "c": torch.zeros(3)}
    store.open.clear()
    publisher.begin(7)
    for name, tensor in weights.items():
        publisher.add(partial(dict, {name: tensor}), gathered=False)
    publisher.end()
    assert waits_for(publisher.settle, store.open)
    for tensor in weights.values():
        tensor += 1  # in place, like the optimiser
    update = publisher.update(7)
    assert {name: float(tensor.flatten()[0]) for name, tensor in tensors_of(update).items()} == {"a": 1, "b": 2, "c": 0}
    assert (update.version, update.received, update.lost_group) == (7, frozenset(), None)
    assert update.checksum is not None


def test_only_one_bucket_with_extra_memory_waits_to_be_stored(store: Store) -> None:
    publisher = Publisher(store, verify=False, deadline_s=10)
    store.open.clear()
    publisher.begin(1)
    publisher.add(partial(dict, {"a": torch.ones(4)}), gathered=True)
    assert waits_for(lambda: publisher.add(partial(dict, {"b": torch.ones(4)}), gathered=True), store.open)
    publisher.end()
    assert tensors_of(publisher.update(1)).keys() == {"a", "b"}


def test_any_number_of_buckets_that_are_not_gathered_yet_may_wait(store: Store) -> None:
    publisher = Publisher(store, verify=False, deadline_s=10)
    store.open.clear()
    publisher.begin(1)
    gathered: list[str] = []
    for name in "abc":
        publisher.add(partial(gather, name, gathered), gathered=False)
    publisher.end()
    assert gathered in ([], ["a"]), "each is gathered when the one before is stored"
    store.open.set()
    assert tensors_of(publisher.update(1)).keys() == {*"abc"}
    assert gathered == [*"abc"]


def gather(name: str, gathered: list[str]) -> dict[str, Tensor]:
    gathered.append(name)
    return {name: torch.ones(4)}


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

    monkeypatch.setattr(publishing, "wait", wait_and_begin_the_next)
    contributor.settle()
    opened.set()
    contributor.settle()


def sent_after(opened: threading.Event) -> dict[str, Tensor]:
    assert opened.wait(10)
    return {}


def closed() -> dict[str, Tensor]:
    raise RuntimeError("Connection closed by peer")


def test_a_version_is_available_while_the_next_is_published(store: Store) -> None:
    publisher = Publisher(store, verify=False, deadline_s=10)
    for version in (1, 2, 3):
        publisher.begin(version)
        publisher.add(partial(dict, {"a": torch.full((2,), float(version))}), gathered=False)
        publisher.end()
    assert [float(tensors_of(publisher.update(version))["a"][0]) for version in (2, 3)] == [2, 3]
    with pytest.raises(ValueError, match="version 1 is not being published"):
        publisher.update(1)


def test_update_raises_the_error_of_storing(store: Store) -> None:
    publisher = Publisher(store, verify=False, deadline_s=10)
    store.full = True
    publisher.begin(1)
    publisher.add(partial(dict, {"a": torch.ones(2)}), gathered=True)
    publisher.end()
    publisher.settle()
    with pytest.raises(HostError, match="the object store is full"):
        publisher.update(1)
    store.full = False
    publisher.begin(2)
    publisher.add(partial(dict, {"a": torch.ones(2)}), gathered=True)
    publisher.end()
    assert publisher.update(2).version == 2


def test_a_hung_object_store_is_an_error_at_the_deadline(store: Store) -> None:
    publisher = Publisher(store, verify=False, deadline_s=0.2)
    store.open.clear()
    publisher.begin(1)
    publisher.add(partial(dict, {"a": torch.ones(2)}), gathered=True)
    publisher.end()
    for call in (publisher.settle, lambda: publisher.update(1)):
        with pytest.raises(DeadlineExceeded, match=r"learner-0 waited 0\.2 s for weights 1 to be stored"):
            call()
    store.open.set()


def test_the_newest_weight_group_receives_the_stored_weights_and_older_ones_end(store: Store) -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    publisher, receiver = Publisher(store, verify=True, deadline_s=30), Receiver(torch.device("cpu"))
    for name in ("1", "2", "3"):
        terms = WeightGroupTerms("127.0.0.1", server.port, name, (("actor-0", 1),), False, True, 10)
        receiver.join(terms, 1)
        assert publisher.join(terms)
        if name == "1":
            continue  # the next group replaces this one before it has sent a version
        version = int(name)
        publisher.begin(version)
        publisher.add(partial(dict, {"a": torch.full((3,), float(version))}), gathered=False)
        publisher.add(partial(dict, {"b": torch.full((2, 2), float(version))}), gathered=True)
        publisher.end()
        update = publisher.update(version)
        assert (update.received, update.lost_group) == (frozenset({"actor-0"}), None if name == "2" else "2")
        files = receiver.take(version)
        assert [file.read().tobytes() for file in files] == [file_of(bucket) for bucket in update.buckets]
        close_all(files)
    ends = time.monotonic() + 10
    while (names := [each.name for each in threading.enumerate() if "weight-group" in each.name]) != ["weight-group-3"]:
        assert time.monotonic() < ends, names
        time.sleep(0.01)


def test_publishing_works_without_a_weight_group_that_did_not_form(store: Store) -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    publisher = Publisher(store, verify=False, deadline_s=30)
    terms = WeightGroupTerms("127.0.0.1", server.port, "1", (("actor-0", 1),), False, False, 0.2)
    assert not publisher.join(terms)
    publisher.begin(1)
    publisher.add(partial(dict, {"a": torch.ones(2)}), gathered=False)
    publisher.end()
    update = publisher.update(1)
    assert (len(update.buckets), update.received, update.lost_group) == (1, frozenset(), None)
