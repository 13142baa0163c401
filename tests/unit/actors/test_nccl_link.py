"""`NcclLink` with real memory and vLLM's types, over a stand-in for the NCCL library that copies between threads.

Whether NCCL itself does what it is asked is for a machine with GPUs to show.
"""

import ctypes
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from vllm.distributed.device_communicators import pynccl_wrapper

from volley.errors import DeadlineExceeded
from volley.weight_links import SENDER, NcclLink

BYTES = {pynccl_wrapper.ncclDataTypeEnum.ncclUint8: 1, pynccl_wrapper.ncclDataTypeEnum.ncclInt64: 8}
DEADLINE = 2.0
REAL = pynccl_wrapper.NCCLLibrary


class Wire:
    """One communicator: an operation is done once every member has asked for it, in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.operations: list[dict[int, tuple[int, int]]] = []  # by rank: address and bytes
        self.lock = threading.Lock()

    def ask(self, number: int, rank: int, address: int, nbytes: int, root: int | None) -> None:
        with self.lock:
            while len(self.operations) <= number:
                self.operations.append({})
            asked = self.operations[number]
            asked[rank] = (address, nbytes)
            if len(asked) == self.size and root is not None:
                assert len({nbytes for _, nbytes in asked.values()}) == 1
                for other in asked.keys() - {root}:
                    ctypes.memmove(asked[other][0], asked[root][0], nbytes)

    def done(self, number: int) -> bool:
        with self.lock:
            return len(self.operations) > number and len(self.operations[number]) == self.size


WIRES: dict[bytes, Wire] = {}
IDENTITIES = itertools.count(1)


class Communicator:
    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.asked, self.aborted = wire, rank, 0, False


class Library:
    """Stands in for `NCCLLibrary`; its methods take what the real ones take."""

    def ncclGetUniqueId(self) -> Any:  # noqa: N802
        return self.unique_id_from_bytes(next(IDENTITIES).to_bytes(128, "little"))

    def unique_id_from_bytes(self, data: bytes) -> Any:
        return REAL.unique_id_from_bytes(self, data)

    def ncclCommInitRank(self, *arguments: Any) -> Communicator:  # noqa: N802
        given = bound(REAL.ncclCommInitRank, self, arguments)
        wire = WIRES.setdefault(bytes(given["unique_id"].internal), Wire(given["world_size"]))
        return Communicator(wire, given["rank"])

    def ncclBroadcast(self, *arguments: Any) -> None:  # noqa: N802
        given = bound(REAL.ncclBroadcast, self, arguments)
        self._ask(given, given["root"])

    def ncclAllReduce(self, *arguments: Any) -> None:  # noqa: N802
        given = bound(REAL.ncclAllReduce, self, arguments)
        assert given["op"] == pynccl_wrapper.ncclRedOpTypeEnum.ncclSum
        self._ask(given, None)

    def ncclCommAbort(self, comm: Communicator) -> None:  # noqa: N802
        comm.aborted = True

    def _ask(self, given: dict[str, Any], root: int | None) -> None:
        comm: Communicator = given["comm"]
        assert given["sendbuff"].value == given["recvbuff"].value
        nbytes = given["count"] * BYTES[given["datatype"]]
        comm.wire.ask(comm.asked, comm.rank, given["sendbuff"].value, nbytes, root)
        comm.asked += 1
        STREAMS[given["stream"].value].queued.append((comm, comm.asked - 1))


def bound(method: Callable[..., Any], library: Library, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return inspect.signature(method).bind(library, *arguments).arguments


class Stream:
    """What is queued on it is done in the order in which the wires do it."""

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream = id(self)
        self.queued: list[tuple[Communicator, int]] = []
        self.followed = 0
        STREAMS[self.cuda_stream] = self

    def wait_stream(self, stream: str) -> None:
        assert stream == "current"
        self.followed += 1


STREAMS: dict[int, Stream] = {}


class Event:
    def record(self, stream: Stream) -> None:
        self._queued = list(stream.queued)

    def query(self) -> bool:
        return all(comm.wire.done(number) for comm, number in self._queued)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", Library)
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "device": lambda _: nullcontext(),
        "current_stream": lambda _: "current",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def links(store: TCPStore, threads: ThreadPoolExecutor, name: str = "1", size: int = 3) -> list[NcclLink]:
    def member(rank: int) -> NcclLink:
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        return NcclLink(PrefixStore(name, client), rank, size, torch.device("cpu"), DEADLINE)

    return list(threads.map(member, reversed(range(size))))[::-1]


def together(threads: ThreadPoolExecutor, members: list[NcclLink], tensors: list[Tensor]) -> None:
    list(threads.map(NcclLink.broadcast, members, tensors))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [1, 3])
def test_every_member_gets_the_senders_tensor(
    store: TCPStore, threads: ThreadPoolExecutor, dtype: torch.dtype, size: int
) -> None:
    members = links(store, threads, size=size)
    for elements in (1, 7, 100_000):
        sent = torch.randint(0, 100, (elements,), dtype=dtype)
        tensors = [sent.clone(), *(torch.zeros_like(sent) for _ in range(size - 1))]
        together(threads, members, tensors)
        assert all(torch.equal(each, sent) for each in tensors)
    assert all(STREAMS[each._stream.cuda_stream].followed == 3 for each in members), "the tensors may still be computed"


def test_groups_side_by_side_do_not_meet(store: TCPStore, threads: ThreadPoolExecutor) -> None:
    first, second = links(store, threads, "1"), links(store, threads, "2")
    for members, value in ((first, 5), (second, 6)):
        tensors = [torch.full((4,), value if rank == SENDER else 0, dtype=torch.uint8) for rank in range(3)]
        together(threads, members, tensors)
        assert all(each.tolist() == [value] * 4 for each in tensors)


def test_members_meet_when_all_have_come(store: TCPStore, threads: ThreadPoolExecutor) -> None:
    members = links(store, threads)
    meeting = [threads.submit(each.meet) for each in members[1:]]
    time.sleep(0.1)
    assert not any(each.done() for each in meeting)
    members[0].meet()
    for each in meeting:
        each.result(10)


def test_a_member_that_does_not_take_part_is_an_error_at_the_deadline(
    store: TCPStore, threads: ThreadPoolExecutor
) -> None:
    sender, receiver, _ = links(store, threads)
    begun = time.monotonic()
    waiting = threads.submit(receiver.broadcast, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(DeadlineExceeded, match=r"rank 0 waited 2 s for the weight group"):
        sender.broadcast(torch.ones(4, dtype=torch.uint8))
    assert isinstance(waiting.exception(10), DeadlineExceeded)
    assert DEADLINE <= time.monotonic() - begun < DEADLINE + 5
    for each in (sender, receiver):
        each.close()
        assert each._communicator.aborted
