"""One digest of a whole set of weights, however it is cut into safetensors files."""

import hashlib
import json
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray


class WeightsDigest:
    """The digest of a set of weights whose files arrive one after another.

    It covers every tensor's name, type, shape and bytes; which tensor lies in which file, and their order, do not
    matter. The bytes are hashed with XXH3 (128 bits), as fast as memory: it guards against faults, not against people.
    """

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, file: NDArray[np.uint8]) -> None:
        """Take a whole safetensors file, uint8 [bytes].

        Raises:
            ValueError: it is not a safetensors file, or an earlier file had one of its tensors.
        """
        for name, line in _tensors(file):
            if name in self._lines:
                raise ValueError(f"tensor {name!r} occurs twice")
            self._lines[name] = line

    def hexdigest(self) -> str:
        """SHA-256, in hex, over a line for each tensor in the order of the names."""
        return hashlib.sha256("\n".join(self._lines[name] for name in sorted(self._lines)).encode()).hexdigest()


def weights_checksum(files: Iterable[NDArray[np.uint8]]) -> str:
    """The digest of ``files``, see `WeightsDigest`; raises as its `add` does."""
    digest = WeightsDigest()
    for file in files:
        digest.add(file)
    return digest.hexdigest()


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
            digest = xxhash.xxh3_128_hexdigest(body[start:end])
            yield name, f"{name} {about['dtype']} {about['shape']} {digest}"
