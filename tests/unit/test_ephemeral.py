"""The imports that `volley run` begins before it checks the job."""

import contextlib
import os
from pathlib import Path

import pytest

from services.stack import ephemeral
from services.stack.ephemeral import importing_ahead
from tests.integration.processes import descendants
from volley.forking import VARIABLE
from volley.job import ActorsSpec


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that imports nothing heavy, as on a machine on which nothing runs."""
    monkeypatch.setattr(ephemeral, "PRELOAD", ("this",))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_the_server_ends_with_the_block() -> None:
    before = servers()
    with importing_ahead(ActorsSpec(), None):
        server = Path(os.environ[VARIABLE])
        assert server.exists()
        assert servers() > before
        with importing_ahead(ActorsSpec(), None):  # what `local_stack` does within
            assert Path(os.environ[VARIABLE]) == server
        assert server.exists()
    assert VARIABLE not in os.environ
    assert not server.exists()
    assert servers() <= before


@pytest.mark.parametrize(
    ("actors", "address", "variable"),
    [
        (None, None, None),
        (ActorsSpec(gpus=1), None, None),
        (ActorsSpec(), "10.0.0.1:6379", None),
        (ActorsSpec(), None, "auto"),
    ],
)
def test_none_is_started_that_nobody_would_ask(
    monkeypatch: pytest.MonkeyPatch, actors: ActorsSpec | None, address: str | None, variable: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    before = servers()
    with importing_ahead(actors, address):
        assert VARIABLE not in os.environ
        assert servers() <= before


def servers() -> set[int]:
    """The processes below this one that serve forks."""
    return {pid for pid in descendants(os.getpid()) if "forkserver" in command(pid)}


def command(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""
