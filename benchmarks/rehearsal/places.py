"""Where the nodes of a rehearsal run: on this machine's loopback address, or each on its own address.

    namespaces     head 10.231.0.1 ── bridge ─┬─ veth ── namespace of one node, 10.231.0.2
                                              └─ veth ── namespace of another,  10.231.0.3  ...

A network namespace has its own interfaces, addresses and routes: traffic between two nodes goes through their virtual
cables, where it is counted, and a cable can be pulled. This needs root, and `ip` from the package iproute2.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

SUBNET = "10.231.0"
BRIDGE = "vly-br"


class Places(Protocol):
    """Gives nodes their addresses."""

    head: str

    def add(self, node: str) -> str:
        """Make a place for ``node``; returns its address."""

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on the node."""

    def cut(self, node: str) -> bool:
        """Pull the node's cable; returns False if it has none."""

    def received(self, node: str) -> int | None:
        """Bytes the node has received through its cable; None if it has none."""


class OneAddress:
    """All nodes on the loopback address."""

    head = "127.0.0.1"

    def add(self, node: str) -> str:
        return self.head

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def cut(self, node: str) -> bool:
        return False

    def received(self, node: str) -> int | None:
        return None


class Namespaces:
    """One network namespace per node."""

    head = f"{SUBNET}.1"

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def add(self, node: str) -> str:
        self.nodes.append(node)
        address, cable = f"{SUBNET}.{1 + len(self.nodes)}", self.cable(node)
        _ip("netns", "add", _namespace(node))
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", _namespace(node))
        _ip("link", "set", cable, "master", BRIDGE, "up")
        inside = ("-n", _namespace(node))
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "route", "add", "default", "via", self.head)  # processes find their own address by it
        return address

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", _namespace(node), *command]

    def cut(self, node: str) -> bool:
        _ip("link", "set", self.cable(node), "down")
        return True

    def received(self, node: str) -> int | None:
        return int(Path(f"/sys/class/net/{self.cable(node)}/statistics/tx_bytes").read_text())

    def cable(self, node: str) -> str:
        """The name of the node's virtual cable at the bridge."""
        return f"vly-{self.nodes.index(node)}"


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    """A bridge to which namespaces can be added; everything is removed after the block.

    Raises:
        RuntimeError: this machine or account cannot create network namespaces; the message is that of `ip`.
    """
    places = Namespaces()
    _ip("link", "add", BRIDGE, "type", "bridge")
    try:
        _ip("addr", "add", f"{places.head}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        yield places
    finally:
        for node in places.nodes:
            _ip("link", "del", places.cable(node))  # sockets of killed processes may keep a namespace for minutes
            _ip("netns", "del", _namespace(node))
        _ip("link", "del", BRIDGE)


def _namespace(node: str) -> str:
    return f"vly-{node}"


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise RuntimeError("`ip` was not found: install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error
