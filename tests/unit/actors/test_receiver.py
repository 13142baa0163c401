"""The receiving end of a weight group, with a sender in the same process."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.receiver import KEPT, Receiver
from volley.checksum import weights_checksum
from volley.weight_group import WeightGroup, WeightGroupTerms
from volley.weight_links import SENDER


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


class Watched(Receiver):
    """Knows how many received files are in memory."""

    def __init__(self, *, on_device: bool = False) -> None:
        super().__init__(torch.device("cpu"), lambda _: on_device)
        self._files: list[weakref.ref[torch.Tensor]] = []

    def _memory(self, nbytes: int) -> torch.Tensor:
        memory = super()._memory(nbytes)
        self._files.append(weakref.ref(memory))
        return memory

    @property
    def files(self) -> int:
        return sum(file() is not None for file in self._files)


@pytest.fixture(params=[False, True], ids=["in host memory", "on the device"])
def receiver(request: pytest.FixtureRequest) -> Iterator[Watched]:
    watched = Watched(on_device=request.param)
    yield watched
    watched.close()
    until(lambda: watched.files == 0)


def joined(store: TCPStore, receiver: Receiver, *, digests: bool = False, name: str = "1") -> WeightGroup:
    terms = WeightGroupTerms("127.0.0.1", store.port, name, (("actor-0", 1),), False, digests, 10)
    receiver.join(terms, 1)
    return WeightGroup(terms, SENDER)


def send(group: WeightGroup, version: int, files: Sequence[bytes]) -> None:
    group.announce(version)
    for file in files:
        group.send(torch.frombuffer(bytearray(file), dtype=torch.uint8))
    group.send_end()


def take_all(receiver: Receiver, version: int) -> list[bytes]:
    return [file.numpy().tobytes() for file in receiver.take(version)]


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_the_newest_versions_are_kept_until_one_is_taken(store: TCPStore, receiver: Watched) -> None:
    group = joined(store, receiver)
    for version in (1, 2, 3):
        send(group, version, [bytes([version]) * 5, bytes([version]) * 70_000])
        assert group.received(version, None) == (frozenset({"actor-0"}), "")
    until(lambda: receiver.files == 2 * KEPT)
    assert take_all(receiver, 3) == [bytes([3]) * 5, bytes([3]) * 70_000]
    until(lambda: receiver.files == 0)  # version 2 was dropped too
    with pytest.raises(ValueError, match=r"weights 2 were not received, only \[\]"):
        receiver.take(2)
    group.close()


def test_the_receiver_confirms_with_a_checksum(store: TCPStore, receiver: Watched) -> None:
    file = save({"w": torch.arange(9.0)})
    group = joined(store, receiver, digests=True)
    send(group, 1, [file])
    checksum = weights_checksum([np.frombuffer(file, dtype=np.uint8)])
    assert group.received(1, checksum) == (frozenset({"actor-0"}), "")
    send(group, 2, [file])
    assert group.received(2, "0" * 64)[0] == frozenset()
    group.close()
    until(lambda: receiver.files == 2)
    receiver.close()
    assert receiver.files == 0


def test_an_incomplete_version_is_dropped(store: TCPStore, receiver: Watched) -> None:
    group = joined(store, receiver)
    group.announce(1)
    group.send(torch.zeros(100_000, dtype=torch.uint8))
    group.close()
    until(lambda: receiver.files == 0)
    with pytest.raises(ValueError, match="weights 1 were not received"):
        receiver.take(1)
    again = joined(store, receiver, name="2")
    send(again, 2, [b"whole"])
    assert again.received(2, None)[0] == {"actor-0"}
    assert take_all(receiver, 2) == [b"whole"]
    again.close()


def test_too_little_memory_for_a_version_is_noted_and_the_sender_learns_of_it(
    store: TCPStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volley.weight_files.available_memory", lambda: 10 << 20)
    closed, close = list[int](), WeightGroup.close

    def note(group: WeightGroup) -> None:
        closed.append(group.rank)
        close(group)

    monkeypatch.setattr(WeightGroup, "close", note)
    receiver = Watched()
    group = joined(store, receiver)
    group.announce(1)
    group.send(torch.zeros(1000, dtype=torch.uint8))
    with suppress(RuntimeError):  # when the receiver has left, which may be during this call or after it
        group.send(torch.zeros(11 << 20, dtype=torch.uint8))
    assert group.received(1, None)[0] == frozenset()
    until(lambda: "do not fit into 10 MiB of free memory" in caplog.text)
    until(lambda: closed == [1])
    group.close()
    assert receiver.files == 0
