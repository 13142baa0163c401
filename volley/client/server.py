"""Which server a client talks to, and with which token.

Server, in this order:  the argument, VOLLEY_SERVER, `server` in the configuration file, the stack of `volley up`
Token, in this order:   the argument, VOLLEY_TOKEN, `token` in the configuration file if `server` there is the one
                        used, the stack's

The configuration file is ~/.config/volley/config.toml (or in XDG_CONFIG_HOME if that is set):

    server = "https://volley.example.org"
    token = "..."
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from volley.errors import HostError
from volley.local_stack import admin_token_file, read_state, stack_folder


@dataclass(frozen=True, slots=True)
class Configuration:
    """The content of the configuration file."""

    server: str | None = None
    token: str | None = None

    @classmethod
    def read(cls) -> "Configuration":
        """Read the file if it exists. Raises `HostError` if it is invalid, or if others can read a token in it."""
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        file = base / "volley" / "config.toml"
        try:
            tree = tomllib.loads(file.read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise HostError(f"{file}: {error}") from error
        if unknown := sorted(set(tree) - {"server", "token"}):
            raise HostError(f'{file}: unknown key {", ".join(unknown)}; write server = "..." and token = "..."')
        if not all(isinstance(value, str) for value in tree.values()):
            raise HostError(f"{file}: server and token must be strings")
        if "token" in tree and file.stat().st_mode & 0o077:
            raise HostError(f"{file} contains a token and others can read it: chmod 600 {file}")
        return cls(**tree)


def find_server(server: str | None = None, token: str | None = None) -> tuple[str, str | None]:
    """Return the URL of the server and the token to send to it.

    Raises:
        HostError: no server is named and none is up on this machine, or the configuration file is invalid.
    """
    configured = Configuration.read()
    token = token or os.environ.get("VOLLEY_TOKEN")
    found = server or os.environ.get("VOLLEY_SERVER") or configured.server
    if found is None:
        return _local_stack(token)
    if token is None and found == configured.server:
        token = configured.token
    return found.rstrip("/"), token


def _local_stack(token: str | None) -> tuple[str, str | None]:
    folder = stack_folder()
    state = read_state(folder)
    if state is None:
        raise HostError("no server: `volley up` starts one on this machine; --server or VOLLEY_SERVER names another")
    return state.server, token or (admin_token_file(folder).read_text() if state.guarded else None)
