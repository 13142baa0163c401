"""The folder of a stack, in which `volley up` leaves what other commands need.

up.lock      locked by the keeper, the process that keeps the stack up; contains its process id
stack.json   addresses, readable by its owner only
ray.token    token of the stack's Ray cluster, readable by its owner only
admin.token  first token of the API if it requires tokens, readable by its owner only
redis/       the state of all runs
runs/        run folders
logs/        one file per process
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from volley.errors import HostError
from volley.files import replace_text
from volley.local_stack import StackState, admin_token_file, read_state, stack_folder


@dataclass(frozen=True, slots=True)
class StackFolder:
    """The paths and the state of one stack."""

    path: Path

    @classmethod
    def at(cls, path: Path | None = None) -> "StackFolder":
        """Return the folder ``path``, else ``VOLLEY_HOME``, else ``~/.volley``."""
        return cls(stack_folder(path))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def admin_token(self) -> Path:
        return admin_token_file(self.path)

    @property
    def token(self) -> Path:
        return self.path / "ray.token"

    def state(self) -> StackState | None:
        """Return the state of the stack, or None if it is down. If its keeper was killed, the state is outdated."""
        return read_state(self.path)

    def write_state(self, state: StackState) -> None:
        replace_text(self.path / "stack.json", json.dumps(asdict(state), indent=2) + "\n", mode=0o600)

    def forget(self) -> None:
        """Remove the state, because the stack is down."""
        (self.path / "stack.json").unlink(missing_ok=True)

    def keeper(self) -> int | None:
        """Return the process id of the live keeper, or None."""
        try:
            with (self.path / "up.lock").open("r") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(lock.read() or 0) or None
        except FileNotFoundError:
            pass
        return None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the keeper's lock while the block runs. Raises `HostError` if another process holds it."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.runs.mkdir(exist_ok=True)
        self.path.chmod(0o700)
        with (self.path / "up.lock").open("a+") as lock:
            if not _taken(lock.fileno()):
                raise HostError(f"a stack is up in {self.path}: `volley down` stops it")
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def _taken(lock: int) -> bool:
    """Try to take the lock, a few times because `StackFolder.keeper` takes it for a moment to test it."""
    for _ in range(10):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return True
    return False
