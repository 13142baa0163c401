"""The interpreter of a program outside of Volley's own: its command, its import path, and a check that it works."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.outside import child
from environments.programs import one_line
from volley.errors import JobError
from volley.rollout import OpenEnvRollout, ProgramRollout, Rollout, VerifiersRollout

_ADAPTERS = Path(__file__).parent / "adapters"  # run by the other interpreter, like child.py


@dataclass(frozen=True, slots=True)
class Outside:
    """A program outside of Volley's own interpreter.

    Attributes:
        python: the interpreter; ``~`` is the home folder of the user who runs the worker.
        target: ``package.module:function``.
        file: where to find the module; None to import it.
        settings: if not None, the function is called with them and returns the program.
    """

    python: str
    target: str
    file: Path | None = None
    settings: Mapping[str, Any] | None = None

    def command(self) -> list[str]:
        """The child's command. Raises `JobError` if there is no such interpreter."""
        python = Path(self.python).expanduser()
        if not python.is_file() or not os.access(python, os.X_OK):
            raise JobError(
                f"rollout.python: {python} is not an executable file on this machine; `volley env create` makes an "
                "environment and prints its interpreter"
            )
        return [str(python), "-u", child.__file__]

    def hello(self, rows: int | None = None) -> bytes:
        """The first line to the child; with ``rows``, one that asks for at most this many rows of data."""
        target = self.target if rows is None else f"{self.target.partition(':')[0]}:rows"
        fields = {"target": target, "file": self.file and str(self.file), "settings": self.settings, "rows": rows}
        own = str(Path(child.__file__).resolve().parents[2])  # of a checkout; behind all else
        folders = code_folders()
        return as_line(
            {**fields, "path": [each for each in folders if each != own], "behind": [own] * (own in folders)}
        )

    def not_started(self, problem: OSError) -> JobError:
        """The error about an interpreter that the system does not start."""
        return self.refused(f"it does not start ({problem.strerror or problem}); is it Python?")

    def refused(self, why: str) -> JobError:
        """The error about a program that the interpreter cannot run."""
        return JobError(f"rollout.python {self.python} cannot run {self.target!r}: {one_line(why)}")


def outside_of(rollout: Rollout) -> Outside | None:
    """How the job's program runs under an interpreter of its own; None if it runs under Volley's."""
    if isinstance(rollout, VerifiersRollout):
        settings = {"taskset": rollout.taskset, "agent": rollout.agent}
        return Outside(rollout.python, "volley_verifiers:program", _ADAPTERS / "verifiers.py", settings)
    if isinstance(rollout, OpenEnvRollout):
        settings = rollout.model_dump(include={"app", "url", "reset", "action", "observation", "system", "reward"})
        return Outside(rollout.python, "volley_openenv:program", _ADAPTERS / "openenv.py", settings)
    if not isinstance(rollout, ProgramRollout) or rollout.python is None:
        return None
    return Outside(rollout.python, rollout.target)


def code_folders() -> list[str]:
    """Folders on the import path that hold neither the standard library nor installed packages."""
    prefixes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    installed = [Path(prefix, name) for prefix in prefixes for name in ("lib", "lib64")]
    found = [str(Path(place or ".").resolve()) for place in sys.path]
    return [
        place
        for place in dict.fromkeys(found)
        if Path(place).is_dir()
        and not {"site-packages", "dist-packages"} & set(Path(place).parts)
        and not any(Path(place).is_relative_to(each) for each in installed)
    ]


def clean_environment() -> dict[str, str]:
    """This process's environment, without what ties Python to this interpreter."""
    ours = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in ours}


def check_outside(outside: Outside, seconds: float) -> None:
    """Start the program's process once, and end it.

    Raises:
        JobError: there is no such interpreter, or the program cannot be imported or called there.
    """
    said, printed = _ask(outside, outside.hello(), seconds)
    problem = unusable(said.partition(b"\n")[0])
    if problem is not None:
        raise outside.refused(problem or last_line(printed) or "it ended without an answer; is it Python?")


def rows_of(outside: Outside, most: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of data that the environment of an adapter has, ``most`` of them at most.

    Raises:
        JobError: the rows cannot be made, or not in time.
    """
    said, printed = _ask(outside, outside.hello(most), seconds)
    *lines, end = said.splitlines() or [b""]
    try:
        complete = json.loads(end) == {"rows": len(lines)}
        found = [json.loads(line)["row"] for line in lines]
    except (ValueError, RecursionError, KeyError, TypeError):
        complete, found = False, []
    if not complete or not all(isinstance(row, dict) for row in found):
        problem = unusable(end)
        raise outside.refused(problem or last_line(printed) or "it ended without an answer; is it Python?")
    return found


def _ask(outside: Outside, line: bytes, seconds: float) -> tuple[bytes, bytes]:
    """What a child writes and prints until it ends, if ``line`` is all it reads."""
    try:
        process = subprocess.Popen(
            outside.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            start_new_session=True,
        )
    except OSError as problem:
        raise outside.not_started(problem) from None
    with process:
        try:
            return process.communicate(line, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise outside.refused(f"it did not answer within {seconds:g} s") from None
        finally:
            kill_group(process.pid)


def unusable(first: bytes) -> str | None:
    """Why the child cannot be used, by its first line; None if it can, "" if the line is not one of a child."""
    try:
        said = json.loads(first)
    except (ValueError, RecursionError):
        return ""
    if isinstance(said, dict) and isinstance(said.get("ready"), str):
        return None
    return str(said.get("unusable", "")) if isinstance(said, dict) else ""


def last_line(text: bytes) -> str:
    """The last line that is not blank, such as that of a traceback."""
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return one_line(lines[-1].strip()) if lines else ""


def as_line(fields: Mapping[str, Any]) -> bytes:
    """One line of the protocol. Raises `TypeError` or `ValueError` if ``fields`` are not JSON."""
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def kill_group(pid: int) -> None:
    """Kill the process group that ``pid`` began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
