"""Measures what only a slot's cgroup can count: unreaped processes, and memory that was never freed."""

import time
from dataclasses import dataclass

from reward_servers.sandbox.cgroups import SlotGroup

LOOK_S = 0.2  # between two readings of a test's processor time
UNCERTAIN_S = 0.05  # by which two measurements of processor time may differ
PAUSES_S = (0.0, 0.001, 0.004, 0.02, 0.1, 0.4)
SLACK_BYTES = 16 << 20  # a sandbox that holds this much more memory than at rest is replaced


@dataclass(frozen=True, slots=True)
class Rest:
    """What the cgroup of a sandbox uses while no program runs: memory in bytes, and number of processes."""

    memory: int = 0
    processes: int = 0

    def excess(self, group: SlotGroup) -> str:
        """Describe what the group holds beyond this, or return "". Waits for pending frees; ignores file cache."""
        for pause in PAUSES_S:
            time.sleep(pause)
            if not (found := self._excess_now(group)):
                return ""
        group.drop_caches()
        return found and self._excess_now(group)

    def _excess_now(self, group: SlotGroup) -> str:
        memory, processes = group.memory_bytes() - self.memory, group.process_count() - self.processes
        return f"{memory >> 20} MB, {processes} processes" if memory > SLACK_BYTES or processes > 0 else ""


class Meter:
    """Measures the processor time of one test by its cgroup, which includes processes that were never waited for."""

    def __init__(self, group: SlotGroup | None, limit_s: float) -> None:
        self._group, self._limit_s = group, limit_s
        self._began = self._read()
        self._look_at = time.monotonic() + LOOK_S

    def _read(self) -> float:
        return (self._group.cpu_s() or 0.0) if self._group else 0.0

    def over(self) -> bool:
        """Return whether the limit is exceeded; reads the counter at most every ``LOOK_S`` seconds."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        return self._read() - self._began > self._limit_s + UNCERTAIN_S

    def hidden_s(self, known_s: float) -> float:
        """Return the processor seconds beyond ``known_s``, those of the program and the zygote; 0 if insignificant."""
        hidden = self._read() - self._began - known_s
        return hidden if hidden > UNCERTAIN_S else 0.0
