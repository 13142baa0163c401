"""Equal weights have equal checksums, however they are split into files."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from volley.checksum import weights_checksum


def files(*parts: dict[str, torch.Tensor]) -> list[NDArray[np.uint8]]:
    return [np.frombuffer(save(part), dtype=np.uint8) for part in parts]


A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def test_the_checksum_does_not_depend_on_files_or_order() -> None:
    whole = weights_checksum(files({"a": A, "b": B}))
    assert weights_checksum(files({"b": B}, {"a": A})) == whole
    assert len(whole) == 64


@pytest.mark.parametrize(
    "other",
    [
        {"a": A, "c": B},
        {"a": A.reshape(3, 2), "b": B},
        {"a": A.to(torch.float64), "b": B},
        {"a": torch.nextafter(A, A + 1), "b": B},
        {"a": A},
    ],
    ids=["name", "shape", "type", "last bit", "missing"],
)
def test_the_checksum_depends_on_everything_else(other: dict[str, torch.Tensor]) -> None:
    assert weights_checksum(files(other)) != weights_checksum(files({"a": A, "b": B}))


def test_malformed_files_are_rejected() -> None:
    with pytest.raises(ValueError, match="'a' occurs twice"):
        weights_checksum(files({"a": A}, {"a": A}))
    with pytest.raises(ValueError, match="not a safetensors file"):
        weights_checksum([np.zeros(16, dtype=np.uint8)])
    with pytest.raises(ValueError, match="not a safetensors file"):
        weights_checksum([np.full(16, 255, dtype=np.uint8)])
