"""Tensors in a GPU's memory that another process reads in place, through CUDA's inter-process handles.

The handles pass from process to process as the header of a safetensors file that has no content: JSON, so that nothing
is unpickled. Their memory must stay as it is until the other process has dropped the tensors.
"""

import base64
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, device

# Where torch's `rebuild_cuda_tensor` takes each of them; `opened` adds the arguments that do not differ.
POSITIONS = {
    "shape": 1,
    "stride": 2,
    "offset": 3,
    "dtype": 5,
    "memory": 7,
    "memory_bytes": 8,
    "memory_offset": 9,
    "counter": 11,
    "counter_offset": 12,
    "event": 13,
    "wait_for_event": 14,
}
BYTES = ("memory", "counter", "event")


def header_of(tensors: Mapping[str, "Tensor"]) -> NDArray[np.uint8]:
    """The header for ``tensors``, all on one GPU, uint8 [bytes]."""
    text = json.dumps({name: _described(tensor) for name, tensor in tensors.items()}).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)


def opened(described: Mapping[str, Any], on: "device") -> "Tensor":
    """A tensor that an entry of a header describes, in the memory of the process that wrote it.

    Args:
        on: the GPU, as this process counts it.
    """
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    given = {key: base64.b64decode(value) if key in BYTES else value for key, value in described.items()}
    arguments: list[Any] = [None] * (1 + max(POSITIONS.values()))
    for key, position in POSITIONS.items():
        arguments[position] = given[key]
    arguments[0], arguments[4], arguments[6], arguments[10] = torch.Tensor, torch.storage.TypedStorage, on.index, False
    arguments[1], arguments[2] = torch.Size(given["shape"]), tuple(given["stride"])
    arguments[5] = getattr(torch, str(given["dtype"]))
    tensor: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return tensor


def _described(tensor: "Tensor") -> dict[str, Any]:
    from torch.multiprocessing.reductions import reduce_tensor

    arguments = reduce_tensor(tensor.detach())[1]  # type: ignore[no-untyped-call]
    described = {key: arguments[position] for key, position in POSITIONS.items()}
    described["shape"], described["stride"] = list(described["shape"]), list(described["stride"])
    described["dtype"] = str(described["dtype"]).removeprefix("torch.")
    return {key: base64.b64encode(value).decode() if key in BYTES else value for key, value in described.items()}
