"""Builds the command line of a sandbox process: its interpreter, packages and account.

If the worker runs as root, every slot switches to its own account before bubblewrap starts, because root mapped to
nobody inside would still be root outside. Such an account may be unable to read the interpreter, for example below
``/root``, so ``stage.py`` first binds the paths to a readable place, in a mount namespace that ends with the sandbox.
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
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from reward_servers.sandbox import policy
from volley.errors import HostError

ZYGOTE = Path(__file__).with_name("zygote.py")
STAGE = Path(__file__).with_name("stage.py")
REAP_S = 0.5  # bubblewrap exits on its own after its child has


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The interpreter that runs in the sandbox, which is that of this process, and the packages it may import.

    Attributes:
        executable: path of the interpreter itself, not of a virtual environment's link to it.
        prefix: its installation folder, mounted at the same path.
        packages: (path on the host, name below ``/site``) of each importable package.
    """

    executable: str
    prefix: str
    packages: tuple[tuple[str, str], ...]

    def import_path(self, *, namespaced: bool) -> list[str]:
        """Return the folders from which packages are imported inside."""
        if namespaced:
            return [policy.SITE] if self.packages else []
        return sorted({str(Path(path).parent) for path, _ in self.packages})


@lru_cache
def interpreter(packages: tuple[str, ...] = ()) -> Interpreter:
    """Return this process's interpreter with ``packages``. Raises HostError if one of them is not installed."""
    executable = str(Path(sys.executable).resolve())
    owners = importlib.metadata.packages_distributions() if packages else {}  # reads what all of them installed
    found = [path for name in packages for path in _locate(name, owners.get(name, []))]
    return Interpreter(executable, str(Path(sys.base_prefix).resolve()), tuple((str(p), p.name) for p in found))


def _locate(package: str, distributions: Sequence[str]) -> list[Path]:
    """Return the paths of the package's folder or module, its bundled libraries, and its distributions' metadata."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), *filter(None, (spec.origin,))]
    if not places:
        raise HostError(f"the sandbox needs the package {package!r}, which is not installed: pip install {package}")
    home = Path(places[0])  # a package's folder, or a module's file
    extra = [home.parent / f"{package}.libs"]
    for name in distributions:
        extra.append(home.parent / f"{name}.libs")
        extra.append(Path(str(importlib.metadata.distribution(name)._path)))  # type: ignore[attr-defined]
    return [home, *dict.fromkeys(path for path in extra if path.exists())]


def bubblewrap() -> str | None:
    """Return the path of bubblewrap, or None if it is not installed."""
    return shutil.which("bwrap")


def namespaced_command(inside: Interpreter, uid: int | None, control: int) -> list[str]:
    """Return the command line of a sandbox with namespaces. Raises HostError if bubblewrap is missing."""
    bwrap = bubblewrap()
    if bwrap is None:
        raise HostError("bubblewrap is not installed: apt-get install bubblewrap (or dnf install bubblewrap)")
    binds = [(path, path) for path in policy.SYSTEM_DIRS]
    if not inside.prefix.startswith("/usr"):
        binds.append((inside.prefix, inside.prefix))
    binds += [(path, f"{policy.SITE}/{name}") for path, name in inside.packages]
    binds.append((str(ZYGOTE), policy.INNER))
    command = [bwrap, *policy.bubblewrap_mounts()]
    for source, target in binds:
        command += ["--ro-bind", source, target]
    for folder in _package_folders(inside.prefix):
        command += ["--tmpfs", folder, "--remount-ro", folder]
    command += ["--chdir", policy.TMP, "--remount-ro", "/dev", "--remount-ro", "/"]
    return _as_account([*command, *_python(inside.executable, policy.INNER, control)], uid, binds, sources_only=True)


@lru_cache
def _package_folders(prefix: str) -> tuple[str, ...]:
    """Return the site-packages and dist-packages folders of the interpreters below the mounted folders."""
    roots = dict.fromkeys([*policy.SYSTEM_DIRS, prefix])
    found = [path for root in roots for pattern in policy.PACKAGE_FOLDERS for path in Path(root).glob(pattern)]
    return tuple(dict.fromkeys(str(path) for path in found if path.is_dir() and not path.is_symlink()))


def bare_command(inside: Interpreter, uid: int | None, control: int) -> list[str]:
    """Return the command line of a sandbox without namespaces (tiers C and none)."""
    binds = [(inside.prefix, ""), (str(ZYGOTE), "")]
    return _as_account(_python(inside.executable, str(ZYGOTE), control), uid, binds, sources_only=False)


def _python(executable: str, script: str, control: int) -> list[str]:
    return [executable, "-s", "-S", "-P", "-B", script, str(control)]


@lru_cache
def _libraries() -> str:
    """Return the folder of libpython if the interpreter is linked to it, else ""."""
    shared = sysconfig.get_config_var("Py_ENABLE_SHARED")
    return str(Path(sysconfig.get_config_var("LIBDIR")).resolve()) if shared else ""


def _as_account(command: list[str], uid: int | None, binds: list[tuple[str, str]], *, sources_only: bool) -> list[str]:
    if uid is None:
        return command
    hidden = [source for source, _ in binds if not _open_to_all(source)]
    plan = {"uid": uid, "command": command, "stage": hidden, "sources_only": sources_only, "libraries": _libraries()}
    return [sys.executable, "-I", "-S", "-B", str(STAGE), json.dumps(plan)]


@lru_cache
def _open_to_all(path: str) -> bool:
    """Return whether any account can reach ``path``: it and every folder above let other users pass."""
    folders = [Path(path), *Path(path).parents]
    return all(folder.stat().st_mode & 0o001 or not folder.is_dir() for folder in folders)


def end(process: subprocess.Popen[bytes], *, namespaced: bool) -> None:
    """Kill a sandbox and everything in it.

    The first process of its namespaces is killed before bubblewrap, so that bubblewrap reaps it. Otherwise it would
    remain a zombie, and count as a process of the slot, until the host's init reaps it, if that ever happens.
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
    except OSError:  # it has ended, or the kernel lacks this file
        return []
