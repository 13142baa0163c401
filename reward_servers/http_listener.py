"""Where an HTTP server listens, and the token that it asks for; shared by the servers that commands start."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from volley.errors import HostError


@contextlib.contextmanager
def listener_on(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket, which is closed at the end. Raises HostError if ``host`` or ``port`` cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as problem:
        raise HostError(f"--host {host} is not an address of this machine: {problem.strerror}") from problem
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as problem:
            reason = f"cannot listen on port {port} of {host}: {problem.strerror}"
            raise HostError(f"{reason}; stop the process that uses it or choose another --port") from problem
        yield listener


def read_token(path: Path) -> str:
    """Return the token in a file. Raises `HostError` if the file cannot be read or is empty."""
    try:
        token = path.read_text().strip()
    except OSError as problem:
        raise HostError(f"cannot read the token file {path}: {problem.strerror}") from problem
    if not token:
        raise HostError(f"the token file {path} is empty: write the token on one line")
    return token
