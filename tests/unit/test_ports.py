"""Ports that are chosen for a server before it starts."""

import socket
from pathlib import Path

import pytest

from volley import ports
from volley.ports import DEALT, LOWEST, free_port


def test_a_free_port_is_not_one_that_the_kernel_deals_out() -> None:
    found = {free_port() for _ in range(50)}
    assert len(found) > 40
    assert min(found) >= LOWEST
    assert max(found) < int(DEALT.read_text().split()[0])


def test_a_port_on_which_somebody_listens_is_not_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "LOWEST", port)
        dealt = tmp_path / "range"
        dealt.write_text(f"{port + 1}\t60999\n")  # the only candidate is taken
        monkeypatch.setattr(ports, "DEALT", dealt)
        assert free_port() != port


def test_a_kernel_that_does_not_say_what_it_deals_out_has_the_usual_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ports, "DEALT", tmp_path / "none")
    assert LOWEST <= free_port() < 32_768


def test_where_the_kernel_deals_out_all_ports_it_deals_out_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dealt = tmp_path / "range"
    dealt.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "DEALT", dealt)
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
