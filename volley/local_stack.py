"""Where the stack of `volley up` on this machine is found: its folder, and the addresses in its ``stack.json``."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from volley.errors import HostError

DEFAULT_FOLDER = Path("~/.volley")


@dataclass(frozen=True, slots=True)
class StackState:
    """The addresses and the state of a stack.

    Attributes:
        keeper: process id of its keeper.
        server: URL of the API and the dashboard.
        redis: URL of Redis.
        ray: URL of Ray's job server.
        private: folder for sockets and Ray's session, removed when the stack stops.
        guarded: whether every request to the API needs a token.
        ready: whether the API has answered.
        settings: the settings it was started with, without secrets.
        runs_end_by: while it stops, when its runs will have ended, seconds since 1970.
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


def stack_folder(path: Path | None = None) -> Path:
    """Return the folder ``path``, else ``VOLLEY_HOME``, else ``~/.volley``."""
    return (path or Path(os.environ.get("VOLLEY_HOME") or DEFAULT_FOLDER)).expanduser().absolute()


def admin_token_file(folder: Path) -> Path:
    """Return the file with the first token of the stack's API; it exists if the API requires tokens."""
    return folder / "admin.token"


def read_state(folder: Path) -> StackState | None:
    """Return the state of the stack, or None if it is down. If its keeper was killed, the state is outdated.

    Raises:
        HostError: the state was written by another release.
    """
    try:
        return StackState(**json.loads((folder / "stack.json").read_text()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise HostError(f"{folder}/stack.json was written by another release: remove it") from error
