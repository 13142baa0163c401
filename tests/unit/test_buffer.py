"""The slot buffer: in whatever order groups finish, no group is trained on too late and training never gets stuck."""

import doctest
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator import buffer as buffer_module
from services.coordinator.buffer import SlotBuffer
from tests.plain_buffer import PlainSlotBuffer


def test_the_example_in_the_docstring_is_correct() -> None:
    results = doctest.testmod(buffer_module)
    assert results.attempted >= 14
    assert results.failed == 0


def admit_all(buffer: SlotBuffer[int], next_id: int, version: int) -> list[int]:
    admitted = []
    while buffer.can_admit(started_at=version, version=version):
        buffer.admit(next_id, started_at=version)
        admitted.append(next_id)
        next_id += 1
    return admitted


@settings(max_examples=200, deadline=None)
@given(batch=st.integers(1, 5), lag=st.integers(0, 4), seed=st.integers(0, 10**6), slow=st.floats(0.0, 0.9))
def test_lag_is_bounded_and_training_never_stops(batch: int, lag: int, seed: int, slow: float) -> None:
    """Groups finish in random order, some very late; 40 steps are taken and no group ever exceeds the lag."""
    rng = random.Random(seed)
    buffer: SlotBuffer[int] = SlotBuffer(batch, lag)
    started: dict[int, int] = {}
    unready: list[int] = []
    version = admitted = 0
    idle = 0
    while version < 40:
        new = admit_all(buffer, admitted, version)
        admitted += len(new)
        started.update(dict.fromkeys(new, version))
        unready += new
        assert len(buffer) <= buffer.slots
        if (taken := buffer.take(version)) is not None:
            assert len(taken) == batch
            assert all(version - started[gid] <= lag for gid, _ in taken)
            version += 1
            buffer.release(batch)
            idle = 0
            continue
        # Finish one group; pick a slow one only if no other is left.
        quick = [gid for gid in unready if rng.random() >= slow]
        done = rng.choice(quick or unready)
        unready.remove(done)
        buffer.put(done, done, oldest_version=started[done])
        idle += 1
        assert idle <= buffer.slots, "every group is ready and still no batch"


def test_a_slow_group_delays_no_batch_before_it_is_due() -> None:
    buffer: SlotBuffer[str] = SlotBuffer(batch=2, max_lag=2)
    admit_all_ids = admit_all(buffer, 0, 0)  # type: ignore[arg-type]
    assert admit_all_ids == [0, 1, 2, 3, 4, 5]
    for gid in (1, 2, 3, 4):
        buffer.put(gid, "ready", oldest_version=0)
    assert [gid for gid, _ in buffer.take(0) or []] == [1, 2]
    assert [gid for gid, _ in buffer.take(1) or []] == [3, 4]
    assert buffer.take(2) is None
    assert buffer.waiting_for(2) == [0, 5]
    buffer.put(0, "late", oldest_version=0)
    buffer.put(5, "late", oldest_version=0)
    assert [gid for gid, _ in buffer.take(2) or []] == [0, 5]


def test_synchronous_mode_admits_nothing_until_the_new_weights_are_served() -> None:
    buffer: SlotBuffer[str] = SlotBuffer(batch=1, max_lag=0)
    buffer.admit(0, started_at=0)
    buffer.put(0, "ready", oldest_version=0)
    assert buffer.take(0) == [(0, "ready")]
    assert not buffer.can_admit(started_at=0, version=1)
    buffer.release(1)
    assert not buffer.can_admit(started_at=0, version=1), "actors that still serve version 0 may not start"
    assert buffer.can_admit(started_at=1, version=1)


def test_a_dropped_group_frees_its_slot_immediately() -> None:
    buffer: SlotBuffer[str] = SlotBuffer(batch=1, max_lag=0)
    buffer.admit(0, started_at=0)
    assert not buffer.can_admit(started_at=0, version=0)
    buffer.drop(0)
    assert buffer.can_admit(started_at=0, version=0)


def test_a_group_with_newer_tokens_than_promised_has_a_later_deadline() -> None:
    buffer: SlotBuffer[str] = SlotBuffer(batch=1, max_lag=1)
    buffer.admit(0, started_at=0)
    buffer.admit(1, started_at=0)
    buffer.put(0, "a", oldest_version=0)
    buffer.put(1, "b", oldest_version=1)
    assert buffer.take(1) == [(0, "a")]
    assert buffer.take(2) == [(1, "b")]


@pytest.mark.parametrize("gid", [0, 7])
def test_an_unknown_group_is_an_error(gid: int) -> None:
    with pytest.raises(KeyError):
        SlotBuffer(batch=1, max_lag=1).drop(gid)


OPERATIONS = {"admit": 8, "put": 8, "take": 4, "step": 2, "drop": 1, "lag": 1}  # relative frequency of each operation


@settings(max_examples=200, deadline=None)
@given(batch=st.integers(1, 4), lag=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_it_agrees_with_a_plain_implementation_of_the_rules(batch: int, lag: int, seed: int) -> None:
    """Both give the same answers after any operations, forced admissions and late versions included."""
    rng = random.Random(seed)
    fast: SlotBuffer[int] = SlotBuffer(batch, lag)
    plain: PlainSlotBuffer[int] = PlainSlotBuffer(batch, lag)
    started: dict[int, int] = {}
    version = 2
    for number, name in enumerate(rng.choices(list(OPERATIONS), weights=list(OPERATIONS.values()), k=100)):
        since, own_lag = version - rng.randrange(3), rng.choice([None, None, 0, 1, 3])
        some = rng.choice(sorted(started)) if started else None
        later = rng.randrange(2)
        if name == "admit" and len(started) < 5 * batch:
            started[number] = since
        for buffer in (fast, plain):
            if name == "admit" and number in started:
                buffer.admit(number, started_at=since, lag=own_lag)
            elif name == "put" and some is not None:
                buffer.put(some, some, oldest_version=started[some] + later)
            elif name == "drop" and some is not None:
                buffer.drop(some)
            elif name == "lag":
                buffer.max_lag = later + 1
            elif name == "step":
                buffer.release(buffer.unreleased)
        version += name == "step"
        gone = [some] if name == "drop" and some is not None else []
        if name == "take":
            taken = fast.take(version)
            assert taken == plain.take(version)
            gone = [gid for gid, _ in taken or ()]
        for gid in gone:
            del started[gid]
        assert (len(fast), fast.ready, fast.unreleased, fast.slots) == (
            len(plain),
            plain.ready,
            plain.unreleased,
            plain.slots,
        )
        assert fast.ready_items() == plain.ready_items()
        assert fast.waiting_for(version) == plain.waiting_for(version)
        for at in (version, version - 1):
            asked = {"started_at": at, "version": version}
            assert fast.can_admit(**asked) == plain.can_admit(**asked)
