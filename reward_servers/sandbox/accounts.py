"""Which account a slot runs as: one that no other slot of this host holds while this one does.

A claim is a bound abstract socket. The kernel gives one name to one process at a time and takes it back when that
process ends, however it ends, so there is no file to go stale and no lock to break.
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
    """A claimed user id, which is the group id too."""

    uid: int
    _claim: socket.socket

    def release(self) -> None:
        """Others may have it. May be called twice."""
        self._claim.close()


def claim(index: int) -> Account | None:
    """The account of slot ``index``, or the next free one; None where this process can not change its account.

    Raises:
        HostError: every account of `policy.SLOT_UIDS` is held.
    """
    if os.geteuid() != 0:
        return None
    uids = policy.SLOT_UIDS
    for step in range(len(uids)):
        uid = uids[(index + step) % len(uids)]
        if not _somebodys(uid) and (held := _hold(uid)) is not None:
            return Account(uid, held)
    raise HostError(
        f"all {len(uids)} accounts of sandbox slots ({uids[0]} to {uids[-1]}) are held: run fewer slots on this host"
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
