"""TCP ports: that of API and dashboard, and free ones for what a stack starts."""

import random
import socket
from pathlib import Path

DEFAULT_PORT = 8484  # of API and dashboard, unless a user names another; 8265 would be that of Ray's own dashboard
DEALT = Path("/proc/sys/net/ipv4/ip_local_port_range")  # what the kernel gives to clients, and to servers that ask
USUALLY_DEALT = 32_768  # the lowest of them
LOWEST = 20_000  # Ray's workers may have those below
TRIES = 100


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on.

    The kernel does not deal out any of these, so it most likely stays free until a server listens there.
    """
    below = int(DEALT.read_text().split()[0]) if DEALT.exists() else USUALLY_DEALT
    for port in random.SystemRandom().sample(range(LOWEST, max(LOWEST, below)), min(TRIES, max(0, below - LOWEST))):
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
