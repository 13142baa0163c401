"""Start and end the keeper of a stack, see `services.stack_up`."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from services.foreground import run_in_foreground
from services.stack_state import StackFolder, StackState
from services.stack_up import UpSettings, keep_stack
from volley.errors import HostError

UP_SECONDS = 180.0
DOWN_SECONDS = 120.0  # for what follows the end of the runs
KILLED_SECONDS = 20.0
POLL_SECONDS = 0.1


class UpOtherwise(HostError):
    """A stack is up with other settings than those asked for."""

    exit_code = 4


def bring_up(settings: UpSettings, given: Collection[str] = ()) -> tuple[StackState, bool]:
    """The stack that is up in the settings' folder, and whether this call started it.

    Args:
        given: names of the settings that a stack which is up already must have too.

    Raises:
        UpOtherwise: it has not.
        HostError: it does not come up; the message has the keeper's last words.
    """
    folder = StackFolder(settings.folder)
    folder.logs.mkdir(parents=True, exist_ok=True)
    log = folder.logs / "keeper.log"
    keeper = None
    if folder.keeper() is None:
        with log.open("ab") as out:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "services.stack_up"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=folder.path,
                env={**os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,
            )
        _tell(keeper, settings)
    deadline = time.monotonic() + UP_SECONDS
    while time.monotonic() < deadline:
        state = folder.state()
        if state is not None and state.ready and folder.keeper() == state.keeper:
            started = keeper is not None and keeper.pid == state.keeper
            if not started and (others := differences(settings, given, state)):
                raise UpOtherwise(f"already up with other settings: `volley down` first; {', '.join(others)}")
            return state, started
        if keeper is not None and keeper.poll() is not None and folder.keeper() is None:
            raise HostError(f"the stack did not come up: {_last_words(log)}")
        time.sleep(POLL_SECONDS)
    raise HostError(f"the stack did not come up within {UP_SECONDS:g} s, see {log}: {_last_words(log)}")


def differences(settings: UpSettings, given: Collection[str], state: StackState) -> list[str]:
    """What of the ``given`` settings the stack in ``state`` was started otherwise with, in words."""
    embedded = state.redis.startswith(f"unix://{state.private}/")
    running = {**state.settings, "redis": None if embedded else state.redis}
    asked = {**settings.told(), "redis": settings.redis}
    return [
        f"--{name.replace('_', '-')}" + ("" if name == "redis" else f" is {running.get(name)}, not {asked[name]}")
        for name in sorted(asked.keys() & set(given))
        if running.get(name) != asked[name]
    ]


def stay_up(settings: UpSettings) -> None:
    """Keep the stack up in this process until Ctrl-C or SIGTERM, as an orderly end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        run_in_foreground(keep_stack(settings))


def bring_down(folder: StackFolder) -> bool:
    """End the stack and wait until nothing of it is left; False where none was up.

    Raises:
        HostError: it could not be ended.
    """
    keeper = folder.keeper()
    if keeper is None:
        folder.forget()
        return False
    for number, seconds in ((signal.SIGTERM, DOWN_SECONDS), (signal.SIGKILL, KILLED_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, number)
        asked = time.time()
        while time.time() < max(asked, _runs_end_by(folder)) + seconds:
            if folder.keeper() != keeper:
                return True
            time.sleep(POLL_SECONDS)
    raise HostError(f"the keeper, process {keeper}, does not end")


def _runs_end_by(folder: StackFolder) -> float:
    """When its runs will have ended, as the keeper says while it goes down; 0 before."""
    state = folder.state()
    return state.runs_end_by if state is not None else 0.0


def _tell(keeper: subprocess.Popen[bytes], settings: UpSettings) -> None:
    if keeper.stdin is not None:
        with contextlib.suppress(BrokenPipeError), keeper.stdin as pipe:  # it died at once: its log says why
            pipe.write(settings.model_dump_json().encode())


def _python_path() -> str:
    """The same modules as here, though the keeper runs in another folder."""
    return os.pathsep.join(
        str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    )


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.startswith("volley: ")), " | ".join(lines[-3:]) or "nothing")
