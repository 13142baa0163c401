"""Errors of ``volley reward-server`` before it starts, and the accounts that slots claim."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reward_servers.sandbox import accounts, policy
from services.cli import app
from volley.errors import HostError


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(HostError, match=f"port {port} of 127.0.0.1: .*choose another --port"):
            CliRunner().invoke(app, ["reward-server", "--port", str(port)], catch_exceptions=False)


def test_missing_packages_are_reported() -> None:
    with pytest.raises(HostError, match=r"'nonesuch'.*pip install nonesuch"):
        CliRunner().invoke(app, ["reward-server", "--packages", "numpy, nonesuch"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--host", "0.0.0.0"], "other machines can reach --host 0.0.0.0: pass --token-file"),
        (["--host", "0.0.0.0", "--known-as", "rewards.example"], "pass --token-file"),
        (["--known-as", "http://rewards.example"], "write a host name or an IP address, without scheme"),
    ],
)
def test_a_server_that_anyone_could_use_does_not_start(options: list[str], problem: str) -> None:
    with pytest.raises(HostError, match=problem):
        CliRunner().invoke(app, ["reward-server", "--port", "0", *options], catch_exceptions=False)


def test_slots_on_a_host_never_share_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # only root can change accounts, but any user can claim one
    one, other = accounts.claim(7), accounts.claim(7 + len(policy.SLOT_UIDS))
    assert one is not None
    assert other is not None
    assert other.uid != one.uid
    source = (
        "import os\nos.geteuid = lambda: 0\nfrom reward_servers.sandbox import accounts\nprint(accounts.claim(7).uid)"
    )
    told = subprocess.run(
        [sys.executable, "-c", source], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) in set(policy.SLOT_UIDS) - {one.uid, other.uid}
    one.release()
    again = accounts.claim(one.uid - policy.SLOT_UIDS[0])
    assert again is not None
    assert again.uid == one.uid
    again.release()
    other.release()
