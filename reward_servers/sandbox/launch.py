"""How a sandbox process is started: which interpreter, which packages, which account, which command line.

A worker started by root gives every slot an account of its own before bubblewrap runs: root mapped to nobody inside
is still root outside. Such an account may not reach the interpreter (a virtual environment below ``/root``), so the
paths are first bound to a place it can reach, in a mount namespace that ends with the sandbox: ``stage.py`` does both.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from reward_servers.sandbox import policy
from volley.errors import HostError

ZYGOTE = Path(__file__).with_name("zygote.py")
STAGE = Path(__file__).with_name("stage.py")
REAP_S = 0.5  # bubblewrap ends by itself once what it runs has


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What runs inside: the interpreter of this process, with the packages it may import.

    Attributes:
        executable: path of the real interpreter, not of a virtual environment's link to it.
        prefix: its installation, mounted under the same path.
        packages: (path here, name below ``/site``) of each importable package.
    """

    executable: str
    prefix: str
    packages: tuple[tuple[str, str], ...]

    def import_path(self, *, namespaced: bool) -> list[str]:
        """Where the packages are found inside."""
        if namespaced:
            return [policy.SITE] if self.packages else []
        return sorted({str(Path(path).parent) for path, _ in self.packages})


@lru_cache
def interpreter(packages: tuple[str, ...] = ()) -> Interpreter:
    """This process's interpreter with ``packages``. Raises HostError where one of those is not installed."""
    executable = str(Path(sys.executable).resolve())
    found = [path for name in packages for path in _locate(name)]
    return Interpreter(executable, str(Path(sys.base_prefix).resolve()), tuple((str(p), p.name) for p in found))


def _locate(package: str) -> list[Path]:
    """The package's folder or module, the libraries its wheel brought, and its metadata."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise HostError(f"the sandbox should offer {package!r} but it is not installed here: pip install {package}")
    origin = Path(spec.origin)
    home = origin.parent if spec.submodule_search_locations else origin
    extra = [home.parent / f"{package}.libs"]
    for name in importlib.metadata.packages_distributions().get(package, []):
        extra.append(Path(str(importlib.metadata.distribution(name)._path)))  # type: ignore[attr-defined]
    return [home, *(path for path in extra if path.exists())]


def bubblewrap() -> str | None:
    """Path of bubblewrap, or None."""
    return shutil.which("bwrap")


def namespaced_command(inside: Interpreter, uid: int | None, control: int, *, first_process: bool) -> list[str]:
    """The command line of a sandbox with namespaces. Raises HostError where bubblewrap is missing."""
    bwrap = bubblewrap()
    if bwrap is None:
        raise HostError("bubblewrap is not installed: apt-get install bubblewrap (or dnf install bubblewrap)")
    binds = [(path, path) for path in policy.SYSTEM_DIRS]
    if not inside.prefix.startswith("/usr"):
        binds.append((inside.prefix, inside.prefix))
    binds += [(path, f"{policy.SITE}/{name}") for path, name in inside.packages]
    binds.append((str(ZYGOTE), policy.INNER))
    command = [bwrap, *policy.bubblewrap_mounts(), *(["--as-pid-1"] if first_process else [])]
    for source, target in binds:
        command += ["--ro-bind", source, target]
    command += ["--chdir", policy.TMP, "--remount-ro", "/dev", "--remount-ro", "/"]
    return _as_account([*command, *_python(inside.executable, policy.INNER, control)], uid, binds, sources_only=True)


def bare_command(inside: Interpreter, uid: int | None, control: int) -> list[str]:
    """The command line of a sandbox without namespaces (tier C, none)."""
    binds = [(inside.prefix, ""), (str(ZYGOTE), "")]
    return _as_account(_python(inside.executable, str(ZYGOTE), control), uid, binds, sources_only=False)


def _python(executable: str, script: str, control: int) -> list[str]:
    return [executable, "-s", "-S", "-P", "-B", script, str(control)]


def _as_account(command: list[str], uid: int | None, binds: list[tuple[str, str]], *, sources_only: bool) -> list[str]:
    if uid is None:
        return command
    hidden = [source for source, _ in binds if not _open_to_all(source)]
    plan = {"uid": uid, "command": command, "stage": hidden, "sources_only": sources_only}
    return [sys.executable, "-I", "-S", "-B", str(STAGE), json.dumps(plan)]


@lru_cache
def _open_to_all(path: str) -> bool:
    """May any account reach ``path``? True where every folder above it lets others pass."""
    folders = [Path(path), *Path(path).parents]
    return all(folder.stat().st_mode & 0o001 or not folder.is_dir() for folder in folders)


def end(process: subprocess.Popen[bytes], *, namespaced: bool) -> None:
    """Kill a sandbox and all in it.

    Its namespaces' first process dies before bubblewrap, which then takes note of the death. Left to the host's first
    process, the dead one would count among the slot's processes until that looks, if it ever does.
    """
    if namespaced and (first := _children(process.pid)):
        for child in first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended, or the kernel does not tell
        return []
