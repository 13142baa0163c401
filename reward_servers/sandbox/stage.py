# ruff: noqa: PTH101, PTH102, PTH112, PTH123 - a few calls before exec, without the time pathlib takes to import
"""Become a slot's own account, then the sandbox: ``python stage.py '{"uid", "stage", "command"}'``, started by root.

Paths the account can not reach are bound below a tmpfs in a mount namespace of this process alone, and the command
line is rewritten to name them there. Nothing of it is seen outside, and it ends with the process.
"""

import ctypes
import json
import os
import sys

CLONE_NEWNS, MS_BIND, MS_REC, MS_SLAVE = 0x20000, 4096, 16384, 1 << 19
STAGING = "/mnt"

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """mount(2). Raises OSError."""
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) < 0:
        raise OSError(ctypes.get_errno(), f"mount {source} at {target}: {os.strerror(ctypes.get_errno())}")


def stage(paths: list[str]) -> dict[str, str]:
    """Bind each path below STAGING; returns old path -> new path."""
    if libc.unshare(CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), "unshare of the mount namespace")
    mount("none", "/", "none", MS_REC | MS_SLAVE)
    mount("stage", STAGING, "tmpfs", 0)
    os.chmod(STAGING, 0o755)
    moved = {}
    for number, path in enumerate(paths):
        target = f"{STAGING}/{number}"
        if os.path.isdir(path):
            os.mkdir(target)
        else:
            open(target, "w").close()
        mount(path, target, "none", MS_BIND)
        moved[path] = target
    return moved


def rewrite(command: list[str], old: str, new: str, sources_only: bool) -> list[str]:
    """``command`` with ``old`` named ``new``: everywhere, or only where bubblewrap takes the source of a mount."""
    if sources_only:
        return [new if word == old and command[at - 1] == "--ro-bind" else word for at, word in enumerate(command)]
    return [new + word[len(old) :] if word == old or word.startswith(old + "/") else word for word in command]


def main() -> None:
    plan = json.loads(sys.argv[1])
    command = plan["command"]
    for old, new in stage(plan["stage"]).items() if plan["stage"] else ():
        command = rewrite(command, old, new, plan["sources_only"])
    os.setgroups([])
    os.setgid(plan["uid"])
    os.setuid(plan["uid"])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
