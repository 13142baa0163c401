"""Memory this process may still take: the machine's, or less where a control group bounds it, as in a pod."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be allocated without swapping and without exceeding the memory limit of a control group.

    Args:
        root: of the file system; tests pass another one.
    """
    free = _machine(root)
    for folder in _control_groups(root):
        limit, usage = _limit_and_usage(folder)
        if limit is not None and usage is not None:
            free = min(free, max(0, limit - usage))
    return free


def total_memory(root: Path = ROOT) -> int:
    """Bytes of the machine's memory, or the smallest limit of a control group.

    Args:
        root: of the file system; tests pass another one.
    """
    machine = _kibibytes(root / "proc/meminfo", "MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (_limit_and_usage(folder)[0] for folder in _control_groups(root))
    return min([machine, *(limit for limit in limits if limit is not None)])


def peak_memory() -> int:
    """The largest resident memory that this process ever had, in bytes; 0 if the kernel does not tell."""
    return _kibibytes(ROOT / "proc/self/status", "VmHWM") or 0


def peak_above_now() -> int:
    """By how many bytes this process's resident memory was once larger than now."""
    return max(0, peak_memory() - (_kibibytes(ROOT / "proc/self/status", "VmRSS") or 0))


def resident_memory() -> int:
    """Bytes of this process in memory; 0 if the kernel does not say."""
    return _kibibytes(ROOT / "proc/self/status", "VmRSS") or 0


def return_freed_memory() -> None:
    """Give the system what the allocator keeps for later, where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _machine(root: Path) -> int:
    free = _kibibytes(root / "proc/meminfo", "MemAvailable")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else free


def _kibibytes(file: Path, field: str) -> int | None:
    """The field of a file of the kernel, in bytes; None if it is not there."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders of this process's memory control group and of all groups above it, in both versions of the interface.

    In a container the group's path may be that of the host, which is not mounted there: then the mount itself is the
    container's group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup" if number == "0" else "sys/fs/cgroup/memory")
        group = mount / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _limit_and_usage(folder: Path) -> tuple[int | None, int | None]:
    """The group's limit in bytes and what it uses, without pages of files that the kernel can drop; None if unknown."""
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    usage = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if usage is None:
        return limit, None
    return limit, usage - _droppable(folder / "memory.stat")


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _droppable(stat: Path) -> int:
    """Bytes of cached files that were not used lately, those of groups below included."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
