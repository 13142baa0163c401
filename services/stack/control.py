"""Starts and stops the keeper of a stack, see `services.stack.keeper`."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from services.signals import run_in_foreground
from services.stack.folder import StackFolder
from services.stack.keeper import UpSettings, keep_stack
from volley.errors import HostError
from volley.local_stack import StackState
from volley.processes import last_lines

UP_SECONDS = 180.0
DOWN_SECONDS = 120.0  # to stop the servers after the runs have ended
KILLED_SECONDS = 20.0
POLL_SECONDS = 0.1


class SettingsDiffer(HostError):
    """A stack is already up with other settings than those given."""

    exit_code = 4


def bring_up(settings: UpSettings, given: Collection[str] = ()) -> tuple[StackState, bool]:
    """Start the stack if it is not up. Returns its state, and whether this call started it.

    Args:
        given: names of the settings that must match if the stack is already up.

    Raises:
        SettingsDiffer: they do not match.
        HostError: the stack does not start; the message quotes the end of the keeper's log.
    """
    folder = StackFolder(settings.folder)
    folder.logs.mkdir(parents=True, exist_ok=True)
    log = folder.logs / "keeper.log"
    keeper = None
    if folder.keeper() is None:
        with log.open("ab") as out:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "services.stack.keeper"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=folder.path,
                env={**os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,
            )
        _write_settings(keeper, settings)
    deadline = time.monotonic() + UP_SECONDS
    while time.monotonic() < deadline:
        state = folder.state()
        if state is not None and state.ready and folder.keeper() == state.keeper:
            started = keeper is not None and keeper.pid == state.keeper
            if not started and (others := differences(settings, given, state)):
                raise SettingsDiffer(f"already up with other settings: `volley down` first; {', '.join(others)}")
            return state, started
        if keeper is not None and keeper.poll() is not None and folder.keeper() is None:
            raise HostError(f"the stack did not start: {_end_of(log)}")
        time.sleep(POLL_SECONDS)
    raise HostError(f"the stack did not start within {UP_SECONDS:g} s, see {log}: {_end_of(log)}")


def differences(settings: UpSettings, given: Collection[str], state: StackState) -> list[str]:
    """Describe which of the ``given`` settings differ from those that the stack in ``state`` was started with."""
    embedded = state.redis.startswith(f"unix://{state.private}/")
    running = {**state.settings, "redis": None if embedded else state.redis}
    requested = {**settings.public(), "redis": settings.redis}
    return [
        f"--{name.replace('_', '-')}" + ("" if name == "redis" else f" is {running.get(name)}, not {requested[name]}")
        for name in sorted(requested.keys() & set(given))
        if running.get(name) != requested[name]
    ]


def stay_up(settings: UpSettings) -> None:
    """Keep the stack up in this process until Ctrl-C or SIGTERM, then stop it in order."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        run_in_foreground(keep_stack(settings))


def bring_down(folder: StackFolder) -> bool:
    """Stop the stack and wait until all its processes have ended. Returns False if none was up.

    Raises:
        HostError: the keeper does not end.
    """
    keeper = folder.keeper()
    if keeper is None:
        folder.forget()
        return False
    for number, seconds in ((signal.SIGTERM, DOWN_SECONDS), (signal.SIGKILL, KILLED_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, number)
        signalled = time.time()
        while time.time() < max(signalled, _runs_end_by(folder)) + seconds:
            if folder.keeper() != keeper:
                return True
            time.sleep(POLL_SECONDS)
    raise HostError(f"the keeper, process {keeper}, does not end")


def _runs_end_by(folder: StackFolder) -> float:
    """Return when the runs will have ended, as the keeper announces while it stops them; 0 before."""
    state = folder.state()
    return state.runs_end_by if state is not None else 0.0


def _write_settings(keeper: subprocess.Popen[bytes], settings: UpSettings) -> None:
    if keeper.stdin is not None:
        with contextlib.suppress(BrokenPipeError), keeper.stdin as pipe:  # it died at once; its log says why
            pipe.write(settings.model_dump_json().encode())


def _python_path() -> str:
    """Return PYTHONPATH with absolute paths, because the keeper runs in another folder."""
    return os.pathsep.join(
        str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    )


def _end_of(log: Path) -> str:
    lines = last_lines(log).splitlines()
    return next((line for line in reversed(lines) if line.startswith("volley: ")), " | ".join(lines[-3:]) or "no log")
