"""The least loaded item of the heap, compared with a search through all; items replace others of the same index."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.dealing import SPARE, LeastLoaded


@dataclass(eq=False)
class Item:
    index: int
    samples: int = 0


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_least_loaded_item_is_found_after_any_changes(seed: int) -> None:
    rng = random.Random(seed)
    dealing: LeastLoaded[Item] = LeastLoaded()
    present: list[Item] = []
    gone: list[Item] = []
    for number in range(300):
        event = rng.random()
        if event < 0.05 or not present:
            used = {item.index for item in present}
            present.append(Item(rng.choice([index for index in range(number + 2) if index not in used])))
            dealing.add(present[-1])
        elif event < 0.08:
            gone.append(present.pop(rng.randrange(len(present))))
            dealing.remove(gone[-1])
        elif event < 0.5:
            dealing.first().samples += rng.randint(1, 4)
        else:
            item = rng.choice(present + gone)
            item.samples -= rng.randint(0, item.samples)
            dealing.lighter(item)
        assert len(dealing) == len(present)
        if present:
            assert dealing.first() is min(present, key=lambda item: (item.samples, item.index))


def test_stale_entries_are_removed() -> None:
    dealing: LeastLoaded[Item] = LeastLoaded()
    items = [Item(index) for index in range(4)]
    for item in items:
        dealing.add(item)
    for _ in range(10_000):
        item = dealing.first()
        item.samples += 2
        if item.samples > 6:
            item.samples = 0
            dealing.lighter(item)
    assert len(dealing._heap) <= 2 * len(items) + SPARE + 1


def test_an_empty_heap_is_an_error() -> None:
    dealing: LeastLoaded[Item] = LeastLoaded()
    with pytest.raises(IndexError):
        dealing.first()
