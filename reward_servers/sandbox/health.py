"""Finds the best tier a host supports, proves it by probe attacks, and repeats the probes while the sandbox is used."""

import itertools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reward_servers.sandbox import launch
from reward_servers.sandbox.interpreter import Interpreter
from reward_servers.sandbox.judge import Case, ProgramResult, judge_program
from reward_servers.sandbox.probes import run_probes
from reward_servers.sandbox.slot import SandboxFailure, Slot
from reward_servers.sandbox.slot_config import SlotConfig, Tier
from volley.errors import HostError
from volley.records import VerdictStatus
from volley.scoring import SandboxLimits, SandboxSpec

log = logging.getLogger(__name__)

REPROBE_S = 600.0
_STARTED = itertools.count()
ORDER: tuple[Tier, ...] = ("A", "B", "C", "none")
FIXES = {
    "A": "tier A needs all of tier B and writable memory and pids cgroups: run as root or delegate a cgroup",
    "B": "tier B needs user namespaces and bubblewrap: apt-get install bubblewrap; "
    "sysctl kernel.unprivileged_userns_clone=1",
    "C": "tier C needs seccomp and version 6 of Landlock: Linux 6.12 or later with the landlock module enabled",
    "none": "",
}


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """The isolation between programs and the host, as shown by health checks, responses and the dashboard."""

    tier: Tier
    layers: tuple[str, ...]
    probes_passed: int
    probes_total: int
    problem: str = ""

    def __str__(self) -> str:
        """Format as ``tier A: namespaces, ...; 47 of 47 probes denied``; starts with ``none`` without isolation."""
        tier = "none" if self.tier == "none" else f"tier {self.tier}"
        return (
            f"{tier}: {', '.join(self.layers) or 'no layer'}; {self.probes_passed} of {self.probes_total} probes denied"
        )

    @property
    def ready(self) -> bool:
        """False if a probe was not denied or the sandbox did not start."""
        return not self.problem


class Sandbox:
    """A slot of the best tier that this host supports. Must be used from the thread that created it.

    Raises:
        HostError: the host does not support the required tier; says what is missing.
    """

    def __init__(self, spec: SandboxSpec, *, index: int | None = None, warm_up: str = "") -> None:
        self._spec = spec
        self._base = SlotConfig("A", spec.mechanism, spec.packages, warm_up=warm_up, limits=spec.limits)
        self._slot, self.report = self._establish(_fresh_index() if index is None else index)
        self._probed = time.monotonic()

    @property
    def unsafe(self) -> bool:
        """True if programs run without isolation, which only ``min_tier: none`` allows."""
        return self.report.tier == "none"

    def judge(
        self,
        source: bytes,
        tests: Sequence[Case],
        limits: SandboxLimits | None = None,
        *,
        stop_early: bool = True,
    ) -> ProgramResult:
        """Judge one program; if the sandbox is not ready, the status is refused. Raises SlotEnded after `end`."""
        if time.monotonic() - self._probed > REPROBE_S:
            self.probe()
        if not self.report.ready:
            return ProgramResult(VerdictStatus.REFUSED, 0, None, None, self.report.problem)
        result = judge_program(self._slot, source, tests, limits or self._spec.limits, stop_early=stop_early)
        if result.status is VerdictStatus.INFRA_ERROR:
            self.probe()
        return result

    def interpreter(self) -> Interpreter:
        """An interpreter that keeps its state; close it before the sandbox does anything else.

        Raises:
            SandboxFailure: the sandbox is not ready.
        """
        if time.monotonic() - self._probed > REPROBE_S:
            self.probe()
        if not self.report.ready:
            raise SandboxFailure(self.report.problem)
        return Interpreter(self._slot, self._spec.limits)

    def probe(self) -> SandboxReport:
        """Run all probes again. If any is not denied, the sandbox is not ready until a later call denies them all."""
        total, failed = run_probes(self._slot)
        problem = f"the sandbox let through these probes: {', '.join(failed)}" if failed else ""
        if problem:
            log.error("slot %d: %s", self._slot.index, problem)
        self.report = replace(self.report, probes_passed=total - len(failed), probes_total=total, problem=problem)
        self._probed = time.monotonic()
        return self.report

    def end(self) -> None:
        """Kill whatever runs; `judge` then raises SlotEnded. May be called from any thread, unlike `close`."""
        self._slot.end()

    def close(self) -> None:
        """Stop the sandbox. May be called twice."""
        self._slot.close()

    @property
    def restarts(self) -> int:
        """How often the sandbox was restarted."""
        return max(0, self._slot.restarts)

    def _establish(self, index: int) -> tuple[Slot, SandboxReport]:
        lowest = lowest_tier(self._spec)
        problems = []
        for tier in ORDER[: ORDER.index(lowest) + 1]:
            if tier == "none" and self._spec.min_tier != "none":
                break
            slot, report = self._try(tier, index)
            if report.ready:
                return slot, report
            problems.append(f"tier {tier}: {report.problem}; {FIXES[tier]}")
        raise HostError(
            f"this host cannot isolate model-written code as tier {lowest} requires.\n"
            + "\n".join(problems)
            + "\nIf you trust every program, you can turn isolation off with min_tier: none."
        )

    def _try(self, tier: Tier, index: int) -> tuple[Slot, SandboxReport]:
        slot = None
        config = replace(self._base, tier=tier)
        try:
            slot = Slot(index, config)
            slot.start()
            total, failed = run_probes(slot)
            problem = f"it let through these probes: {', '.join(failed)}" if failed else ""
        except (SandboxFailure, HostError) as failure:
            total, failed, problem = 0, [], str(failure)
        if problem and slot is not None:
            slot.close()
        return slot or Slot(index, replace(config, tier="none")), SandboxReport(
            tier, config.layers, total - len(failed), total, problem
        )


def _fresh_index() -> int:
    """Return a slot number that no other worker of this machine has, if each has at most eight."""
    return os.getpid() * 8 + next(_STARTED)


def lowest_tier(spec: SandboxSpec) -> Tier:
    """Return the weakest tier that ``spec`` accepts; for ``auto``, A if this host has writable cgroups, else B."""
    if spec.min_tier != "auto":
        return spec.min_tier
    return "A" if os.geteuid() == 0 and Path("/sys/fs/cgroup").is_dir() and _cgroups_writable() else "B"


def _cgroups_writable() -> bool:
    from reward_servers.sandbox import cgroups

    group = cgroups.create(f"volley-check-{os.getpid()}")
    if group is not None:
        group.remove()
    return group is not None


def explain_host() -> list[tuple[str, bool, str]]:
    """Return (requirement, whether it is met, how to meet it) for ``volley doctor``."""
    return [
        ("bubblewrap", launch.bubblewrap() is not None, "apt-get install bubblewrap"),
        ("memory and pids cgroups", _cgroups_writable(), FIXES["A"]),
        ("Landlock", _landlock_version() >= 6, FIXES["C"]),
    ]


def _landlock_version() -> int:
    import ctypes

    return int(ctypes.CDLL(None).syscall(444, None, 0, 1))
