"""Safetensors files in memory, read back with the safetensors library."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save_file
from torch import Tensor, nn

from learner.weights import DTYPES, buckets, file_parts, gathered_views, give_usual_mode

SHAPES = st.lists(st.integers(0, 5), max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES, key=str)), SHAPES),
        max_size=6,
    )
)
def test_every_tensor_is_restored_bitwise(parts: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    """One file holds dtypes of several widths, empty tensors and scalars."""
    tensors = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in parts.items()}
    read = load(file_of(tensors))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_tensors_need_not_be_contiguous() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(load(file_of({"w": tensor}))["w"], tensor)


def test_an_unsupported_dtype_is_an_error() -> None:
    with pytest.raises(KeyError):
        file_parts({"w": torch.zeros(2, dtype=torch.int64)})


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_umask_decides_who_can_read_a_file(tmp_path: Path, umask: int, mode: int) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(2)}, file)
    before = os.umask(umask)
    try:
        give_usual_mode([file])
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [file]


def test_buckets_hold_every_parameter_once_without_copying() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    read: dict[str, Tensor] = {}
    for bucket in buckets(model.named_parameters(), 150):
        head, *bodies = file_parts(gathered_views(bucket))
        read |= load(torch.cat([head, *bodies]).numpy().tobytes())
        assert {body.data_ptr() for body in bodies} == {parameter.data_ptr() for _, parameter in bucket}
    expected = dict(model.named_parameters())
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def file_of(tensors: dict[str, Tensor]) -> bytes:
    return bytes(torch.cat(file_parts(tensors)).numpy())
