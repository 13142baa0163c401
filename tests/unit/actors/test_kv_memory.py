"""Caches in memory that takes no room before it is used."""

import mmap
from pathlib import Path

import pytest
import torch

from actors.kv_memory import _LazyZeros, give_back, mapped_zeros

SIZE = 256 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_it_is_what_torch_makes(dtype: torch.dtype) -> None:
    made = mapped_zeros(3, 5, dtype=dtype, device=torch.device("cpu"))
    torch.testing.assert_close(made, torch.zeros(3, 5, dtype=dtype), rtol=0, atol=0)
    assert made.data_ptr() % mmap.PAGESIZE == 0
    made += 7
    assert made.sum().item() == 105


def test_it_takes_memory_only_where_it_is_written_and_gives_it_back() -> None:
    before = resident()
    made = mapped_zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
    assert resident() - before < SIZE / 16
    made[: SIZE // 2] = 1
    assert SIZE / 4 < resident() - before < SIZE * 3 / 4
    view = made[1:]
    del made
    assert view[SIZE // 2 - 2] == 1, "a view keeps the memory"
    del view
    assert resident() - before < SIZE / 16


def test_only_zeros_are_mapped() -> None:
    before = resident()
    with _LazyZeros():
        zeros, ones = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu")), torch.ones(3)
        assert torch.equal(torch.empty(2).fill_(1), ones[:2])
    assert resident() - before < SIZE / 16
    assert zeros.shape == (SIZE,)


def test_memory_of_other_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="on CPUs only, not on cuda:0"):
        mapped_zeros(3, dtype=torch.int8, device=torch.device("cuda:0"))


def test_used_memory_can_be_given_back_and_used_again() -> None:
    before = resident()
    made = mapped_zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
    made += 1
    assert resident() - before > SIZE * 3 / 4
    give_back()
    assert resident() - before < SIZE / 16
    assert made.sum().item() == 0
    made[5] = 3
    assert made.sum().item() == 3
