"""Handles pass between processes as JSON and come out as the arguments that torch needs. CUDA's part is replaced."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from volley.gpu_handles import header_of, opened

SECRET = bytes(range(256))


def shared_cuda(tensor: torch.Tensor, number: int) -> tuple[Any, ...]:
    """What torch would give for ``tensor`` on a GPU."""
    return (
        type(tensor),
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        torch.storage.TypedStorage,
        tensor.dtype,
        0,
        SECRET[number:64],
        4096 * (1 + number),
        512 * number,
        tensor.requires_grad,
        b"\x00counter",
        number,
        b"\xffevent",
        bool(number),
    )


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments with which tensors are rebuilt. Handles are numbered."""
    numbers, arguments = iter(range(99)), list[tuple[Any, ...]]()
    monkeypatch.setattr(
        reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, shared_cuda(tensor, next(numbers)))
    )
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *given: arguments.append(given))
    return arguments


def test_tensors_come_out_with_the_handles_they_went_in_with(rebuilt: list[tuple[Any, ...]]) -> None:
    flat = torch.zeros(40, dtype=torch.bfloat16)
    tensors = {
        "a": flat[4:10].view(2, 3),
        "b": torch.zeros(0, 3),
        "c": torch.nn.Parameter(torch.zeros(3, 4).t()),
        "d": torch.tensor(1, dtype=torch.int64),
    }
    header = header_of(tensors)
    length = int.from_bytes(header[:8].tobytes(), "little")
    described = json.loads(header[8:].tobytes())
    assert length + 8 == len(header)
    assert header.dtype == np.uint8
    for entry in described.values():
        opened(entry, torch.device("cuda", 3))
    for number, (tensor, given) in enumerate(zip(tensors.values(), rebuilt, strict=True)):
        expected = list(shared_cuda(tensor.detach(), number))
        expected[6] = 3  # the GPU as the other process counts it
        expected[0] = torch.Tensor
        assert list(given) == expected


def test_an_entry_has_nothing_to_unpickle(rebuilt: list[tuple[Any, ...]]) -> None:
    entry = json.loads(header_of({"w": torch.zeros(2)})[8:].tobytes())["w"]
    assert all(isinstance(value, str | int | bool | list) for value in entry.values())


def test_the_positions_are_those_of_torchs_function() -> None:
    import inspect

    from volley.gpu_handles import POSITIONS

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert {key: names[place] for key, place in POSITIONS.items()} == {
        "shape": "tensor_size",
        "stride": "tensor_stride",
        "offset": "tensor_offset",
        "dtype": "dtype",
        "memory": "storage_handle",
        "memory_bytes": "storage_size_bytes",
        "memory_offset": "storage_offset_bytes",
        "counter": "ref_counter_handle",
        "counter_offset": "ref_counter_offset",
        "event": "event_handle",
        "wait_for_event": "event_sync_required",
    }
    assert (names[0], names[4], names[6], names[10]) == ("tensor_cls", "storage_cls", "storage_device", "requires_grad")
