# ruff: noqa: PTH101, PTH102, PTH112, PTH123 - avoids the time to import pathlib for a few calls before exec
"""Switches to a slot's account and executes the sandbox. Started by root as ``python stage.py PLAN``.

PLAN is JSON with ``uid``, ``command``, ``stage``, ``sources_only`` and ``libraries``. The paths in ``stage``, which the
account cannot reach, are bound below a tmpfs in a private mount namespace, and the command line is rewritten to use
them there. The mounts are invisible outside and end with the process.
"""

import ctypes
import json
import os
import sys

CLONE_NEWNS, MS_BIND, MS_REC, MS_SLAVE = 0x20000, 4096, 16384, 1 << 19
STAGING = "/mnt"

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """Call mount(2). Raises OSError."""
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) < 0:
        raise OSError(ctypes.get_errno(), f"mount {source} at {target}: {os.strerror(ctypes.get_errno())}")


def stage(paths: list[str]) -> dict[str, str]:
    """Bind each path below STAGING; return a mapping from old to new paths."""
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
    """Replace ``old`` with ``new`` in ``command``: everywhere, or only in the sources of bubblewrap's mounts."""
    if sources_only:
        return [new if word == old and command[at - 1] == "--ro-bind" else word for at, word in enumerate(command)]
    return [new + word[len(old) :] if word == old or word.startswith(old + "/") else word for word in command]


def main() -> None:
    plan = json.loads(sys.argv[1])
    command = plan["command"]
    for old, new in stage(plan["stage"]).items() if plan["stage"] else ():
        command = rewrite(command, old, new, plan["sources_only"])
        if not plan["sources_only"] and plan["libraries"].startswith(old + "/"):
            # The executable looks for its library in the old folder, which the account cannot reach.
            os.environ["LD_LIBRARY_PATH"] = new + plan["libraries"][len(old) :]
    os.setgroups([])
    os.setgid(plan["uid"])
    os.setuid(plan["uid"])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
