"""The pipes between a program and the judge."""

import os

CHUNK = 1 << 16


class Pipes:
    """Pipes that a program writes to. Data beyond a pipe's bound is read and discarded.

    Args:
        bounds: number of bytes to keep, per pipe.
        owner: account that may reopen the pipes, for example as ``/dev/stdout``; None for that of this process.
    """

    def __init__(self, *bounds: int, owner: int | None) -> None:
        self._bounds: dict[int, int] = {}
        self._data: dict[int, bytearray] = {}
        self.writers: list[int] = []
        self.open: set[int] = set()
        self.over = False
        for bound in bounds:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            self._bounds[reader], self._data[reader] = bound, bytearray()
            self.writers.append(writer)
            self.open.add(reader)
            if owner is not None:
                os.fchown(writer, owner, -1)

    def __enter__(self) -> "Pipes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_writers()
        for fd in self._data:
            os.close(fd)

    @property
    def readers(self) -> list[int]:
        return list(self._data)

    def close_writers(self) -> None:
        while self.writers:
            os.close(self.writers.pop())

    def read(self, fd: int) -> bool:
        """Read available data from one pipe; return False at its end."""
        piece = os.read(fd, CHUNK)
        if not piece:
            self.open.discard(fd)
            return False
        room = self._bounds[fd] - len(self._data[fd])
        self._data[fd] += piece[: max(0, room)]
        self.over |= len(piece) > room
        return True

    def contents(self) -> list[bytes]:
        return [bytes(data) for data in self._data.values()]

    def take(self) -> list[bytes]:
        """The contents, which are then dropped."""
        taken = self.contents()
        for data in self._data.values():
            data.clear()
        return taken
