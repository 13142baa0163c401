"""Gives each slot an account that no other slot of this host uses at the same time.

A claim is a bound abstract socket. Only one process can bind a name, and the kernel frees it however that process
ends, so there are no stale files or locks.
"""

import os
import pwd
import socket
from dataclasses import dataclass

from reward_servers.sandbox import policy
from volley.errors import HostError

NAME = "\0volley-slot-account-{}"


@dataclass(frozen=True, slots=True)
class Account:
    """A claimed user id, also used as the group id."""

    uid: int
    _claim: socket.socket

    def release(self) -> None:
        """Let other slots claim the account. May be called twice."""
        self._claim.close()


def claim(index: int) -> Account | None:
    """Claim the account of slot ``index``, or the next free one; None if this process is not root.

    Raises:
        HostError: every account in `policy.SLOT_UIDS` is in use.
    """
    if os.geteuid() != 0:
        return None
    uids = policy.SLOT_UIDS
    for step in range(len(uids)):
        uid = uids[(index + step) % len(uids)]
        if not _somebodys(uid) and (held := _hold(uid)) is not None:
            return Account(uid, held)
    raise HostError(
        f"all {len(uids)} accounts for sandbox slots ({uids[0]} to {uids[-1]}) are in use: run fewer slots on this host"
    )


def _hold(uid: int) -> socket.socket | None:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(NAME.format(uid))
    except OSError:
        held.close()
        return None
    return held


def _somebodys(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
