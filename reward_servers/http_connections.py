"""Keeps idle and unfinished connections from using up a server's connection limit; shared by both HTTP servers."""

from typing import Protocol


class Connection(Protocol):
    """A connection that the server can close."""

    def cut_off(self) -> None:
        """Close the connection."""
        ...


class WaitingConnections:
    """The connections of one server on which no whole request has arrived yet, longest-waiting first."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        self._waiting[connection] = None

    def discard(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def cut_longest(self) -> None:
        """Close the connection that has waited longest, to make room for a new one."""
        longest = next(iter(self._waiting), None)
        if longest is not None:
            self.discard(longest)
            longest.cut_off()
