"""The configuration of a slot: its tier, the layers of isolation that follow from it, and the limits of a process."""

import math
import os
from dataclasses import dataclass, field
from typing import Literal

from reward_servers.sandbox import policy
from volley.scoring import SandboxLimits

Tier = Literal["A", "B", "C", "none"]


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Configuration of a slot.

    Attributes:
        tier: which layers isolate a program.
        mechanism: ``pooled`` runs many programs in one sandbox, ``fresh`` starts a sandbox for each.
        packages: packages that programs may import besides the standard library.
        preload: modules imported before the first program, so that programs need not wait for them.
        warm_up: trusted code that runs once before the first program and fills caches that all programs share.
        limits: default limits of one test.
        without: layers that are switched off, for tests that show what each layer does.
    """

    tier: Tier
    mechanism: Literal["pooled", "fresh"] = "pooled"
    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = policy.PRELOAD
    warm_up: str = ""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    without: frozenset[str] = frozenset()

    @property
    def namespaced(self) -> bool:
        return self.tier in ("A", "B") and "namespaces" not in self.without

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the active layers, outermost first."""
        have = {
            "A": ("account", "cgroup", "namespaces", "landlock", "seccomp", "rlimits"),
            "B": ("account", "namespaces", "landlock", "seccomp", "rlimits"),
            "C": ("account", "landlock", "seccomp", "rlimits"),
            "none": ("rlimits",),
        }[self.tier]
        return tuple(name for name in have if name not in self.without and (name != "account" or os.geteuid() == 0))


def rlimits(limits: SandboxLimits, config: SlotConfig) -> dict[str, tuple[int, int]]:
    """Return (soft, hard) per-process limits of one test. Without a cgroup, address space stands in for memory."""
    memory = limits.memory_mb << 20
    space = 4 * memory + (1 << 30) if "cgroup" in config.layers else memory + (256 << 20)
    equal = {
        "RLIMIT_AS": space,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_mb << 20,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    cpu = math.ceil(limits.cpu_s)
    return {name: (value, value) for name, value in equal.items()} | {"RLIMIT_CPU": (cpu, cpu + 1)}
