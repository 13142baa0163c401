"""The receiving end of a weight group, with a sender in the same process."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.receiver import KEPT, Receiver
from actors.weight_files import close_all
from volley.checksum import weights_checksum
from volley.weight_group import SENDER, WeightGroup, WeightGroupTerms


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


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
    files = receiver.take(version)
    read = [Path(file.path).read_bytes() for file in files]
    close_all(files)
    return read


def memory_files() -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it since it was listed
            count += "volley-weights" in str(link.readlink())
    return count


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_the_newest_versions_are_kept_as_files_another_process_can_open(store: TCPStore) -> None:
    receiver = Receiver(torch.device("cpu"))
    group = joined(store, receiver)
    for version in (1, 2, 3):
        send(group, version, [bytes([version]) * 5, bytes([version]) * 70_000])
        assert group.received(version, None) == (frozenset({"actor-0"}), "")
    assert memory_files() == 2 * KEPT
    assert take_all(receiver, 3) == [bytes([3]) * 5, bytes([3]) * 70_000]
    assert memory_files() == 0  # version 2 was dropped too
    with pytest.raises(ValueError, match=r"weights 2 were not received, only \[\]"):
        receiver.take(2)
    group.close()


def test_the_receiver_confirms_with_a_checksum(store: TCPStore) -> None:
    file = save({"w": torch.arange(9.0)})
    receiver = Receiver(torch.device("cpu"))
    group = joined(store, receiver, digests=True)
    send(group, 1, [file])
    checksum = weights_checksum([np.frombuffer(file, dtype=np.uint8)])
    assert group.received(1, checksum) == (frozenset({"actor-0"}), "")
    send(group, 2, [file])
    assert group.received(2, "0" * 64)[0] == frozenset()
    group.close()
    assert memory_files() == 2
    receiver.close()
    assert memory_files() == 0


def test_an_incomplete_version_is_dropped(store: TCPStore) -> None:
    receiver = Receiver(torch.device("cpu"))
    group = joined(store, receiver)
    group.announce(1)
    group.send(torch.zeros(100_000, dtype=torch.uint8))
    group.close()
    until(lambda: memory_files() == 0)
    with pytest.raises(ValueError, match="weights 1 were not received"):
        receiver.take(1)
    again = joined(store, receiver, name="2")
    send(again, 2, [b"whole"])
    assert again.received(2, None)[0] == {"actor-0"}
    assert take_all(receiver, 2) == [b"whole"]
    again.close()
