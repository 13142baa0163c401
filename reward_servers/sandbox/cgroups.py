"""A memory and a process-count cgroup per slot, under version 1 or 2, below the group this worker is in itself."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PREFIX = "volley-slot-"
OVERHEAD_MB = 64  # the zygote and its page tables live in the group too
OVERHEAD_PIDS = 8


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """The cgroup directories of one slot; the same directory twice under version 2."""

    memory: Path
    pids: Path
    version: int

    def limit(self, memory_mb: int, processes: int) -> None:
        """Set the bounds. Raises OSError."""
        megabytes = memory_mb + OVERHEAD_MB
        if self.version == 1:
            (self.memory / "memory.limit_in_bytes").write_text(str(megabytes << 20))
        else:
            (self.memory / "memory.max").write_text(str(megabytes << 20))
            (self.memory / "memory.swap.max").write_text("0")
        (self.pids / "pids.max").write_text(str(processes + OVERHEAD_PIDS))

    def oom_kills(self) -> int:
        """How many processes of the slot the kernel has killed for lack of memory."""
        path = self.memory / ("memory.oom_control" if self.version == 1 else "memory.events")
        for line in path.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def processes(self) -> list[int]:
        """Process ids in the group, as seen from here."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.pids / "cgroup.procs").read_text().split()]
        return []

    def open_members(self) -> list[int]:
        """Open ``cgroup.procs`` files: a process that writes 0 into them joins."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self._folders()]

    def remove(self) -> None:
        """Remove the directories; the kernel refuses while a process is left, and the caller sees that."""
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def _folders(self) -> list[Path]:
        return [self.memory] if self.memory == self.pids else [self.memory, self.pids]


def create(name: str) -> SlotGroup | None:
    """Directories called ``name``, or None where this host gives no writable memory and pids controllers."""
    group = _find(name)
    if group is None:
        return None
    _remove_stale(group)
    try:
        group.memory.mkdir(exist_ok=True)
        group.pids.mkdir(exist_ok=True)
        group.limit(256, 16)
        group.oom_kills()
    except OSError:
        with contextlib.suppress(OSError):
            group.remove()
        return None
    return group


def _remove_stale(group: SlotGroup) -> None:
    """Remove the directories of workers that were killed before they could."""
    for folder in {group.memory.parent, group.pids.parent}:
        for left in folder.glob(f"{PREFIX}*"):
            pid = left.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):
                    left.rmdir()


def _find(name: str) -> SlotGroup | None:
    own: dict[str, str] = {}
    for line in OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    if "memory" in own and "pids" in own:
        return SlotGroup(MOUNT / "memory" / own["memory"] / name, MOUNT / "pids" / own["pids"] / name, version=1)
    if "" in own and (MOUNT / "cgroup.controllers").exists():
        folder = MOUNT / own[""] / name
        return SlotGroup(folder, folder, version=2)
    return None
