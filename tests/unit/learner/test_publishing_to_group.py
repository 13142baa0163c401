"""What goes through a weight group, and what of it reaches the object store, which a small class replaces."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.receiver import Receiver
from learner.publishing import REMEMBERED, Publisher, Source
from tests.unit.learner.test_publishing import Store, file_of, publisher_of, tensors_of
from volley.errors import WeightsGone
from volley.records import WeightUpdate
from volley.weight_group import WeightGroupTerms


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver(torch.device("cpu"))
    yield receiver
    receiver.close()


def terms(server: TCPStore, name: str, *actors: str, deadline_s: float = 10) -> WeightGroupTerms:
    members = tuple((actor, 1) for actor in actors or ("actor-0",))
    return WeightGroupTerms("127.0.0.1", server.port, name, members, cuda=False, digests=True, deadline_s=deadline_s)


def published(publisher: Publisher, version: int) -> WeightUpdate:
    """A version of two buckets whose tensors are full of its number."""
    publisher.begin(version)
    publisher.add(partial(dict, {"a": torch.full((3,), float(version))}), Source.WEIGHTS)
    publisher.add(partial(dict, {"b": torch.full((2, 2), float(version))}), Source.GATHERED)
    publisher.end()
    return publisher.update(version)


def test_the_newest_weight_group_receives_the_weights_and_older_ones_end(
    store: Store, server: TCPStore, receiver: Receiver
) -> None:
    publisher = publisher_of(store, verify=True, deadline_s=30)
    for name in ("1", "2", "3"):
        receiver.join(terms(server, name), 1)
        assert publisher.join(terms(server, name))
        if name == "1":
            continue  # the next group replaces this one before it has sent a version
        update = published(publisher, int(name))
        assert (update.received, update.lost_group) == (frozenset({"actor-0"}), None if name == "2" else "2")
        received = receiver.take(update.version)
        stored = publisher.store(update.version)
        assert [file.numpy().tobytes() for file in received] == [file_of(bucket) for bucket in stored.buckets]
    ends = time.monotonic() + 10
    while (names := [each.name for each in threading.enumerate() if "weight-group" in each.name]) != ["weight-group-3"]:
        assert time.monotonic() < ends, names
        time.sleep(0.01)


def test_what_the_group_delivered_is_stored_when_somebody_needs_it(
    store: Store, server: TCPStore, receiver: Receiver
) -> None:
    publisher = publisher_of(store, verify=True)
    receiver.join(terms(server, "1"), 1)
    assert publisher.join(terms(server, "1"))
    first, second = published(publisher, 1), published(publisher, 2)
    assert store.puts == 0
    assert not first.stored
    assert first.nbytes == second.nbytes > 0
    asking = [threading.Thread(target=publisher.store, args=(1,)) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert store.puts == 2, "each bucket once, however many ask"
    stored = publisher.store(1)
    assert stored.stored
    assert {name: float(tensor.flatten()[0]) for name, tensor in tensors_of(stored).items()} == {"a": 1, "b": 1}
    assert (stored.version, stored.checksum, stored.received) == (1, first.checksum, first.received)
    for version in range(3, 3 + REMEMBERED):
        published(publisher, version)
    with pytest.raises(WeightsGone, match="does not have weights 2 any longer"):
        publisher.store(2)


def test_weights_kept_for_an_actor_do_not_change_with_the_model(
    store: Store, server: TCPStore, receiver: Receiver
) -> None:
    publisher, weight = publisher_of(store), torch.ones(1000)
    receiver.join(terms(server, "1"), 1)
    assert publisher.join(terms(server, "1"))
    for version in (1, 2, 3):
        publisher.begin(version)
        publisher.add(partial(dict, {"a": weight}), Source.WEIGHTS)
        publisher.end()
        publisher.settle()
        weight += 1
    for version in (2, 3):
        assert torch.equal(tensors_of(publisher.store(version))["a"], torch.full((1000,), float(version)))


def test_a_version_that_loses_a_member_is_stored_whole(store: Store, server: TCPStore, receiver: Receiver) -> None:
    publisher = publisher_of(store, deadline_s=30)
    both = terms(server, "1", "actor-0", "actor-1", deadline_s=2)
    leaver = Receiver(torch.device("cpu"), LeavesAtTheSecondFile())
    for rank, each in ((1, receiver), (2, leaver)):
        each.join(both, rank)
    assert publisher.join(both)
    publisher.begin(1)
    for name in "abcd":
        publisher.add(partial(dict, {name: torch.full((1000,), float(ord(name)))}), Source.ON_DEMAND)
    publisher.end()
    update = publisher.update(1)
    assert update.lost_group == "1"
    assert update.stored
    stored = tensors_of(update)
    assert stored.keys() == {*"abcd"}
    assert all(torch.equal(tensor, torch.full((1000,), float(ord(name)))) for name, tensor in stored.items())
    assert store.puts == 4
    after = published(publisher, 2)
    assert (after.stored, after.received) == (True, frozenset())


class LeavesAtTheSecondFile:
    """Makes its receiver fail when it asks for memory for the second time."""

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self, nbytes: int) -> bool:
        self._asked += 1
        if self._asked > 1:
            raise RuntimeError("no memory")
        return False


def test_publishing_works_without_a_weight_group_that_did_not_form(store: Store, server: TCPStore) -> None:
    publisher = publisher_of(store, deadline_s=30)
    assert not publisher.join(terms(server, "1", deadline_s=0.2))
    update = published(publisher, 1)
    assert (update.stored, update.received, update.lost_group) == (True, frozenset(), None)
    assert publisher.store(1) == update
