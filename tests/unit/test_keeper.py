"""Servers are restarted when they die or hang, and stopped in order; a folder has at most one keeper."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.stack import processes as keeper
from services.stack.folder import StackFolder
from services.stack.processes import Server, kept_up
from volley.errors import HostError
from volley.local_stack import StackState

BEAT = """
import os, pathlib, signal, sys, time
file = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (file.with_name("ended").write_text("in order"), sys.exit()))
while True:
    file.write_text(f"{os.getpid()} {time.monotonic()}")
    time.sleep(0.02)
"""


@pytest.fixture
def beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that writes its process id and the time to a file; it is healthy while the file is fresh."""
    monkeypatch.setattr(keeper, "PROBE_SECONDS", 0.1)
    file = tmp_path / "beat"

    async def answers() -> None:
        if not file.exists() or asyncio.get_running_loop().time() - messages(file)[1] > 0.3:
            raise HostError("silent")

    return Server(
        "beat",
        [sys.executable, "-c", BEAT, str(file)],
        os.environ,
        tmp_path / "log",
        answers,
        start_seconds=10,
        stop_seconds=30,
        hung_seconds=0.5,
    )


def messages(file: Path) -> tuple[int, float]:
    pid, _, moment = file.read_text().partition(" ")
    return int(pid or 0), float(moment or 0)


async def another(file: Path, pid: int) -> int:
    """Wait until another process has replaced ``pid``; returns its id."""
    for _ in range(1000):
        if (found := messages(file)[0]) not in (pid, 0):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"{pid} was not replaced")


async def test_a_killed_server_is_restarted_and_stopped_in_order(beat: Server, tmp_path: Path) -> None:
    async with kept_up(beat):
        first, _ = messages(tmp_path / "beat")
        os.kill(first, signal.SIGKILL)
        second = await another(tmp_path / "beat", first)
    assert (tmp_path / "ended").read_text() == "in order"
    assert not Path(f"/proc/{second}").exists()


async def test_a_hung_server_is_killed_and_restarted(beat: Server, tmp_path: Path) -> None:
    async with kept_up(beat):
        first, _ = messages(tmp_path / "beat")
        os.kill(first, signal.SIGSTOP)
        await another(tmp_path / "beat", first)


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    async def answers() -> None:
        raise HostError("silent")

    command = [sys.executable, "-c", "raise SystemExit('no such port')"]
    server = Server("it", command, os.environ, tmp_path / "log", answers, start_seconds=10, stop_seconds=1)
    with pytest.raises(HostError, match=r"it ended with code 1; .* ends with: no such port"):
        async with kept_up(server):
            pass


def test_a_folder_has_only_one_keeper(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path / "stack")
    assert folder.keeper() is None
    with folder.kept():
        assert folder.keeper() == os.getpid()
        folder_of = f"s.StackFolder(pathlib.Path({str(folder.path)!r}))"
        code = f"import pathlib, services.stack.folder as s; {folder_of}.kept().__enter__()"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "a stack is up in" in other.stderr
    assert folder.keeper() is None


def test_addresses_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    state = StackState(1, "http://x", "unix:///y", "http://z", "/tmp/p", guarded=True, ready=True)
    assert folder.state() is None
    folder.write_state(state)
    assert folder.state() == state
    assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "stack.json").write_text('{"keeper": 1}')
    with pytest.raises(HostError, match="written by another release"):
        folder.state()
