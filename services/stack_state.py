"""What `volley up` leaves for other commands to find: one folder a stack.

up.lock      held by the keeper, the process that keeps the stack up; it holds the keeper's process id
stack.json   addresses, readable by its owner only
ray.token    of the stack's Ray cluster, readable by its owner only
redis/       everything that is known of all runs
runs/        run folders
logs/        one file a process
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from volley.errors import HostError

DEFAULT_FOLDER = Path("~/.volley")


@dataclass(frozen=True, slots=True)
class StackState:
    """Where a stack is reached.

    Attributes:
        keeper: process id of its keeper.
        server: URL of the API and the dashboard.
        redis: URL of Redis.
        ray: URL of Ray's job server.
        private: folder of sockets and of Ray's session, removed when the stack goes down.
        guarded: every request to the API needs a token.
        ready: the API has answered.
        settings: that it was started with, but for secrets.
        runs_end_by: while it goes down, when its runs will have ended, seconds since 1970.
    """

    keeper: int
    server: str
    redis: str
    ray: str
    private: str
    guarded: bool
    ready: bool
    settings: dict[str, Any] = field(default_factory=dict)
    runs_end_by: float = 0.0


@dataclass(frozen=True, slots=True)
class StackFolder:
    """Paths and state of one stack."""

    path: Path

    @classmethod
    def at(cls, path: Path | None = None) -> "StackFolder":
        """The stack in ``path``, in ``VOLLEY_HOME``, or in ``~/.volley``."""
        return cls((path or Path(os.environ.get("VOLLEY_HOME") or DEFAULT_FOLDER)).expanduser().absolute())

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def admin_token(self) -> Path:
        return self.path / "admin.token"

    @property
    def token(self) -> Path:
        return self.path / "ray.token"

    def state(self) -> StackState | None:
        """Addresses of the stack, None where there is none; one that was killed may be told for up."""
        try:
            return StackState(**json.loads((self.path / "stack.json").read_text()))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            raise HostError(f"{self.path}/stack.json is of another release: remove it") from error

    def write_state(self, state: StackState) -> None:
        write_private(self.path / "stack.json", json.dumps(asdict(state), indent=2) + "\n")

    def forget(self) -> None:
        """Remove the state: the stack is down."""
        (self.path / "stack.json").unlink(missing_ok=True)

    def keeper(self) -> int | None:
        """Process id of the live keeper, None where there is none."""
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
        """Be the stack's keeper for the length of the block; raises `HostError` while another is."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.runs.mkdir(exist_ok=True)
        self.path.chmod(0o700)
        with (self.path / "up.lock").open("a+") as lock:
            if not _taken(lock.fileno()):
                raise HostError(f"a stack is up in {self.path}: `volley down` ends it")
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def _taken(lock: int) -> bool:
    """Take the lock. One who looks whether it is held holds it for a moment, and is waited for."""
    for _ in range(10):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return True
    return False


def write_private(file: Path, text: str) -> None:
    """Replace ``file`` by one that its owner alone can read; a reader sees the old one or the new one."""
    aside = file.with_name(f".{file.name}.partial")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    aside.replace(file)
