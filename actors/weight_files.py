"""Weights on their way from the actor's process to its engine's: files that exist only in memory.

An anonymous memory file has no name in any folder, so none can be left behind however either process ends, and it is
not bound by the size of ``/dev/shm``, which containers often keep at 64 MB. The engine opens it by way of the
actor's file descriptor.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from volley.errors import HostError


class WeightFile:
    """One safetensors file in memory; close it when the engine has loaded it."""

    def __init__(self, *parts: NDArray[np.uint8]) -> None:
        """Copy ``parts`` end to end; without any it stays empty, to be filled.

        Raises:
            HostError: there is not that much free memory.
        """
        _check_room(sum(part.nbytes for part in parts))
        self._fd = os.memfd_create("volley-weights")
        for part in parts:
            self._write(np.ascontiguousarray(part).data)

    @property
    def path(self) -> str:
        """Opens the file in any process of this user on this machine while it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def sized(self, nbytes: int) -> NDArray[np.uint8]:
        """Make it so long, and give its content to be written; uint8 [nbytes], valid after `close` too.

        Raises:
            HostError: there is not that much free memory.
        """
        _check_room(nbytes)
        os.ftruncate(self._fd, nbytes)
        return np.frombuffer(mmap.mmap(self._fd, nbytes), dtype=np.uint8)

    def read(self) -> NDArray[np.uint8]:
        """The whole content, uint8 [bytes]."""
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            return np.frombuffer(file.read(), dtype=np.uint8)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._fd, data) :]


@contextmanager
def closing_all() -> Iterator[list[WeightFile]]:
    """A list whose files are closed at the end, however it ends."""
    files: list[WeightFile] = []
    try:
        yield files
    finally:
        close_all(files)


def close_all(files: Iterable[WeightFile]) -> None:
    for file in files:
        file.close()


def _check_room(nbytes: int) -> None:
    free = available_memory()
    if free is not None and nbytes > free:
        raise HostError(
            f"{nbytes / 2**20:.0f} MiB of weights do not fit into the {free / 2**20:.0f} MiB of free memory: "
            "lower actors.count or actors.kv_cache_gb, or use a machine with more memory"
        )


def available_memory() -> int | None:
    """Bytes this machine can still hand out; None where the kernel does not say."""
    with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
