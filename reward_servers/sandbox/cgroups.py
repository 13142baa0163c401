"""One cgroup per slot, below that of this worker: limits memory and processes, counts CPU time. Versions 1 and 2."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PREFIX = "volley-slot-"
OVERHEAD_MB = 64  # for the zygote and its page tables, which are in the group too
OVERHEAD_PIDS = 8


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """The cgroup directories of one slot; under version 2, all are the same directory.

    Attributes:
        cpu: directory that counts processor time; None if version 1 has no writable ``cpuacct``.
    """

    memory: Path
    pids: Path
    cpu: Path | None
    version: int

    def limit(self, memory_mb: int, processes: int) -> None:
        """Set the limits, plus an allowance for the zygote. Raises OSError."""
        megabytes = memory_mb + OVERHEAD_MB
        if self.version == 1:
            (self.memory / "memory.limit_in_bytes").write_text(str(megabytes << 20))
        else:
            (self.memory / "memory.max").write_text(str(megabytes << 20))
            (self.memory / "memory.swap.max").write_text("0")
        (self.pids / "pids.max").write_text(str(processes + OVERHEAD_PIDS))

    def oom_kills(self) -> int:
        """Return how many processes of the slot the kernel has killed because memory ran out."""
        path = self.memory / ("memory.oom_control" if self.version == 1 else "memory.events")
        return _field(path, "oom_kill")

    def cpu_s(self) -> float | None:
        """Return the processor seconds of everything that ever ran in the group; None if they are not counted."""
        if self.cpu is None:
            return None
        if self.version == 1:
            return int((self.cpu / "cpuacct.usage").read_text()) / 1e9
        return _field(self.cpu / "cpu.stat", "usage_usec") / 1e6

    def memory_bytes(self) -> int:
        """Return the memory in use in bytes, without the cache of files on disk, which the kernel frees when needed."""
        stat = self.memory / "memory.stat"
        return self._charged_bytes() - _field(stat, "inactive_file") - _field(stat, "active_file")

    def _charged_bytes(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.memory / name).read_text())

    def drop_caches(self) -> None:
        """Ask the kernel to reclaim what it can, such as its own caches of names and inodes."""
        with contextlib.suppress(OSError):  # unsupported, or less could be reclaimed than requested
            if self.version == 1:
                (self.memory / "memory.force_empty").write_text("0")
            else:
                (self.memory / "memory.reclaim").write_text(str(self._charged_bytes()))

    def process_count(self) -> int:
        """Return the number of processes and threads in the group."""
        return int((self.pids / "pids.current").read_text())

    def processes(self) -> list[int]:
        """Return the process ids in the group, as numbered in this process's pid namespace."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.pids / "cgroup.procs").read_text().split()]
        return []

    def open_members(self) -> list[int]:
        """Open the ``cgroup.procs`` files; a process joins the group by writing 0 to each."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self._folders()]

    def make(self) -> None:
        """Create the directories. Raises OSError."""
        for folder in self._folders():
            folder.mkdir(exist_ok=True)

    def remove(self) -> None:
        """Remove the directories. Raises OSError if they still contain a process."""
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def _folders(self) -> list[Path]:
        return list(dict.fromkeys(path for path in (self.memory, self.pids, self.cpu) if path is not None))


def create(name: str) -> SlotGroup | None:
    """Create a cgroup called ``name``; None if this host has no writable memory and pids controllers."""
    group = _find(name)
    if group is None:
        return None
    _remove_stale(group)
    try:
        group.make()
        group.limit(256, 16)
        group.oom_kills()
    except OSError:
        with contextlib.suppress(OSError):
            group.remove()
        return None
    return group


def _remove_stale(group: SlotGroup) -> None:
    """Remove the directories of workers that were killed before they could do so."""
    for folder in {path.parent for path in group._folders()}:
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
        memory, pids = (MOUNT / kind / own[kind] / name for kind in ("memory", "pids"))
        cpu = MOUNT / "cpuacct" / own["cpuacct"] / name if "cpuacct" in own else None
        return SlotGroup(memory, pids, cpu if cpu and os.access(cpu.parent, os.W_OK) else None, version=1)
    if "" in own and (MOUNT / "cgroup.controllers").exists():
        folder = MOUNT / own[""] / name
        return SlotGroup(folder, folder, folder, version=2)
    return None


def _field(path: Path, name: str) -> int:
    """Return the number after ``name`` in a file of lines ``name number``; 0 if it is missing."""
    for line in path.read_text().splitlines():
        key, _, count = line.partition(" ")
        if key == name:
            return int(count)
    return 0
