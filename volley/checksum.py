"""One digest of a whole set of weights, however it is cut into safetensors files."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray


def weights_checksum(files: Iterable[NDArray[np.uint8]]) -> str:
    """SHA-256, in hex, over every tensor's name, type, shape and bytes, in the order of the names.

    Args:
        files: safetensors files as uint8 arrays [bytes]; which tensor lies in which file does not matter.

    Raises:
        ValueError: a file is no safetensors file, or a name occurs twice.
    """
    lines: dict[str, str] = {}
    for file in files:
        for name, line in _tensors(file):
            if name in lines:
                raise ValueError(f"tensor {name!r} occurs twice")
            lines[name] = line
    return hashlib.sha256("\n".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def _tensors(file: NDArray[np.uint8]) -> Iterator[tuple[str, str]]:
    # The format: an 8-byte little-endian header length, a JSON header with offsets, then the tensors' bytes.
    data = memoryview(np.ascontiguousarray(file).data)
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("not a safetensors file: its header is longer than the file")
    header = json.loads(bytes(data[8 : 8 + length]))
    body = data[8 + length :]
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            digest = hashlib.sha256(body[start:end]).hexdigest()
            yield name, f"{name} {about['dtype']} {about['shape']} {digest}"
