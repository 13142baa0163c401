"""Passes weights from process to process through anonymous files in memory: from an actor, or a learner, to an engine.

Such a file has no name in any folder, so it cannot be left behind however the processes end, and it is not limited by
the size of ``/dev/shm``, which is often 64 MB in containers. The engine opens it through its owner's file descriptor.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from volley.errors import HostError
from volley.memory import available_memory


class WeightFile:
    """A safetensors file in memory. Close it after the engine has loaded it."""

    def __init__(self, *parts: NDArray[np.uint8]) -> None:
        """Write ``parts`` end to end; without parts, the file is empty.

        Raises:
            HostError: too little free memory.
        """
        _check_memory(sum(part.nbytes for part in parts))
        self._fd = os.memfd_create("volley-weights")
        try:
            for part in parts:
                self._write(np.ascontiguousarray(part).data)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """A path under which any process of this user on this machine can open the file until it is closed."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> NDArray[np.uint8]:
        """A copy of the content, uint8 [bytes]."""
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            return np.frombuffer(file.read(), dtype=np.uint8)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._fd, data) :]


def host_memory(nbytes: int) -> NDArray[np.uint8]:
    """A writable array, uint8 [nbytes], whose memory goes back to the host as soon as nobody holds it.

    Raises:
        HostError: too little free memory.
    """
    _check_memory(nbytes)
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


@contextmanager
def opened(paths: Sequence[str]) -> Iterator[list[str]]:
    """Paths of the same files, which are valid within the block even if their owner closes them, or dies.

    Raises:
        OSError: their owner closed them before.
    """
    descriptors: list[int] = []
    try:
        for path in paths:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        yield [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def closing_all() -> Iterator[list[WeightFile]]:
    """A list whose files are closed at the end of the block, also after an error."""
    files: list[WeightFile] = []
    try:
        yield files
    finally:
        close_all(files)


def close_all(files: Iterable[WeightFile]) -> None:
    for file in files:
        file.close()


def _check_memory(nbytes: int) -> None:
    free = available_memory()
    if nbytes > free:
        raise HostError(
            f"{nbytes / 2**20:.0f} MiB of weights do not fit into {free / 2**20:.0f} MiB of free memory: "
            "lower actors.count or actors.kv_cache_gb, or use a machine with more memory"
        )
