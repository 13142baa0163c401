"""The members of a weight group over gloo, one thread each."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from volley.errors import DeadlineExceeded
from volley.weight_group import WeightGroup, WeightGroupTerms
from volley.weight_links import SENDER, GlooLink

FILES = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (3, 1, 1 << 20)]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def terms_at(store: TCPStore, *, digests: bool = False, deadline_s: float = 10) -> WeightGroupTerms:
    members = (("actor-0", 1), ("actor-2", 2))
    return WeightGroupTerms("127.0.0.1", store.port, "1", members, False, digests, deadline_s)


def receive(group: WeightGroup, *, checksum: str = "") -> tuple[int, list[Tensor]]:
    """Receive one version."""
    version = group.awaited(10)
    assert version is not None
    files = []
    while nbytes := group.next_size():
        files.append(torch.empty(nbytes, dtype=torch.uint8))
        group.receive(files[-1])
    group.confirm(version, checksum)
    return version, files


def joined(threads: ThreadPoolExecutor, terms: WeightGroupTerms) -> list[WeightGroup]:
    return list(threads.map(lambda rank: WeightGroup(terms, rank), range(terms.size)))


def send(group: WeightGroup, version: int) -> None:
    group.announce(version)
    for file in FILES:
        group.send(file)
    group.send_end()


def problem_of(sender: WeightGroup) -> str:
    """The error that a version did not reach all members, whichever call raises it."""
    try:
        send(sender, 1)
    except (DeadlineExceeded, RuntimeError) as error:
        return str(error)
    return sender.received(1, None)[1]


def test_ranks_follow_the_order_of_the_members(store: TCPStore) -> None:
    terms = terms_at(store)
    assert (terms.size, terms.ranks("actor-0"), terms.ranks("actor-2")) == (4, range(1, 2), range(2, 4))
    with pytest.raises(ValueError, match="actor-1 is not a member"):
        terms.ranks("actor-1")


def test_every_receiver_gets_every_version_bitwise(store: TCPStore, threads: ThreadPoolExecutor) -> None:
    sender, *receivers = joined(threads, terms_at(store))
    assert receivers[0].awaited(0.01) is None
    for version in (5, 6):
        receiving = [threads.submit(receive, each) for each in receivers]
        send(sender, version)
        assert sender.received(version, None) == (frozenset({"actor-0", "actor-2"}), "")
        for done in receiving:
            got, files = done.result()
            assert got == version
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(files, FILES, strict=True))
    sender.close()
    for each in receivers:
        with pytest.raises(EOFError):
            each.awaited(10)


def test_an_actor_with_a_wrong_checksum_in_one_process_has_not_received_it(
    store: TCPStore, threads: ThreadPoolExecutor
) -> None:
    sender, *receivers = joined(threads, terms_at(store, digests=True))
    receiving = [
        threads.submit(receive, each, checksum=said) for each, said in zip(receivers, ("aa", "aa", "bb"), strict=True)
    ]
    send(sender, 1)
    received, problem = sender.received(1, "aa")
    assert received == {"actor-0"}
    assert "received other weights than were sent" in problem
    for done in receiving:
        done.result()


def test_a_missing_member_is_an_error_at_the_deadline(store: TCPStore) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="all 4 members of weight group 1"):
        WeightGroup(terms_at(store, deadline_s=0.3), SENDER)
    assert time.monotonic() - begun < 5


def test_a_member_that_leaves_is_immediately_an_error_for_the_others(
    store: TCPStore, threads: ThreadPoolExecutor
) -> None:
    sender, *receivers = joined(threads, terms_at(store, deadline_s=30))
    left, *stay = receivers

    def leave() -> None:
        left.awaited(10)
        left.next_size()
        left.close()

    leaving: Future[None] = threads.submit(leave)
    staying = [threads.submit(receive, each) for each in stay]
    begun = time.monotonic()
    assert "Connection" in problem_of(sender)
    sender.close()
    for done in staying:
        assert isinstance(done.exception(), RuntimeError)
    leaving.result()
    assert time.monotonic() - begun < 20


def test_a_member_that_hangs_is_an_error_at_the_deadline(store: TCPStore, threads: ThreadPoolExecutor) -> None:
    sender, *receivers = joined(threads, terms_at(store, deadline_s=3))
    staying = [threads.submit(receive, each) for each in receivers[1:]]
    begun = time.monotonic()
    assert problem_of(sender), "its own deadline, or that of a receiver, which then leaves"
    assert 1.5 < time.monotonic() - begun < 15
    for done in staying:
        assert isinstance(done.exception(), DeadlineExceeded | RuntimeError)


def test_a_group_that_does_not_connect_leaves_nothing_open(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(link: GlooLink, tensor: Tensor) -> None:
        raise RuntimeError("Connection closed by peer")

    closed = list[GlooLink]()
    monkeypatch.setattr(GlooLink, "broadcast", fail)
    monkeypatch.setattr(GlooLink, "close", lambda link: closed.append(link))
    alone = WeightGroupTerms("127.0.0.1", store.port, "1", (), False, False, 10)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        WeightGroup(alone, SENDER)
    assert len(closed) == 1
