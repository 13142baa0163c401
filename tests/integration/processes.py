"""Which processes there are, for tests that leave none."""

import subprocess
import time
from pathlib import Path

from volley.processes import is_alive


def descendants(root: int) -> set[int]:
    """The processes that ``root`` started, and those they started."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in listing.splitlines())}
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in found | {root}} - found:
        found |= more
    return found


def wait_until_gone(pids: set[int], seconds: float = 15) -> None:
    """Fails with the command lines of those that stay."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left]
