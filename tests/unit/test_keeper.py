"""Servers are restarted when they die or hang, and stopped in order; a folder has at most one keeper."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.api.settings import ApiSettings
from services.stack import keeper as stack_keeper
from services.stack import processes as keeper
from services.stack.folder import StackFolder
from services.stack.keeper import UpSettings
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
        if not file.exists() or asyncio.get_running_loop().time() - messages(file)[1] > 1:
            raise HostError("silent")

    return Server(
        "beat",
        [sys.executable, "-c", BEAT, str(file)],
        os.environ,
        tmp_path / "log",
        answers,
        start_seconds=10,
        stop_seconds=30,
        hung_seconds=3,
    )


def messages(file: Path) -> tuple[int, float]:
    pid, _, moment = file.read_text().partition(" ")
    return int(pid or 0), float(moment or 0)


async def beating(file: Path, other_than: int = 0) -> int:
    """Wait until a process writes to the file, which it empties now and then; returns its id."""
    for _ in range(1000):
        if (found := messages(file)[0]) not in (other_than, 0):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"no process but {other_than} writes")


async def test_a_killed_server_is_restarted_and_stopped_in_order(beat: Server, tmp_path: Path) -> None:
    async def wrote() -> None:  # on a busy machine it may be silent for a while
        if not (tmp_path / "beat").exists():
            raise HostError("silent")

    patient = dataclasses.replace(beat, answers=wrote, hung_seconds=30, start_seconds=30)
    async with kept_up(patient) as started:
        await started
        first = await beating(tmp_path / "beat")
        os.kill(first, signal.SIGKILL)
        second = await beating(tmp_path / "beat", first)
    assert (tmp_path / "ended").read_text() == "in order"
    assert not Path(f"/proc/{second}").exists()


async def test_a_hung_server_is_killed_and_restarted(beat: Server, tmp_path: Path) -> None:
    async with kept_up(beat) as started:
        await started
        first = await beating(tmp_path / "beat")
        os.kill(first, signal.SIGSTOP)
        await beating(tmp_path / "beat", first)


async def test_a_server_is_not_killed_for_a_pause_of_this_process(beat: Server, tmp_path: Path) -> None:
    paused = asyncio.Event()

    async def answers() -> None:
        if not (tmp_path / "beat").exists():
            raise HostError("silent")
        if (tmp_path / "pause").exists() and not paused.is_set():
            time.sleep(1)  # noqa: ASYNC251 - the loop is blocked for longer than hung_seconds
            paused.set()
            raise HostError("no answer in time")

    async with kept_up(dataclasses.replace(beat, answers=answers, hung_seconds=0.5)) as started:
        await started
        first = await beating(tmp_path / "beat")
        (tmp_path / "pause").touch()
        await paused.wait()
        await asyncio.sleep(0.5)
        assert await beating(tmp_path / "beat") == first


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    async def answers() -> None:
        raise HostError("silent")

    command = [sys.executable, "-c", "raise SystemExit('no such port')"]
    server = Server("it", command, os.environ, tmp_path / "log", answers, start_seconds=10, stop_seconds=1)
    with pytest.raises(HostError, match=r"it ended with code 1; .* ends with: no such port"):
        async with kept_up(server) as started:
            await started


async def test_servers_start_side_by_side_and_a_wait_may_be_cancelled(beat: Server, tmp_path: Path) -> None:
    async def never() -> None:
        raise HostError("silent")

    (tmp_path / "silent").mkdir()
    command = [*beat.command[:-1], str(tmp_path / "silent" / "beat")]
    silent = dataclasses.replace(beat, name="silent", command=command, answers=never)
    async with kept_up(silent) as waits, kept_up(beat) as started:
        await started
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await waits
        pid = await beating(tmp_path / "silent" / "beat")
    assert not Path(f"/proc/{pid}").exists()


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


def test_signing_keys_reach_the_api_server_and_no_process_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLLEY_WEBHOOK_KEY", "whsec_x")
    folder, settings = (
        StackFolder(tmp_path),
        UpSettings(folder=tmp_path, cpus=1, runs=tmp_path, webhook_host=("a.org",)),
    )
    state = StackState(1, "http://x", "unix:///y", "http://z", "/tmp/p", guarded=False, ready=True)
    environment = stack_keeper._environment(settings, folder)
    assert "VOLLEY_WEBHOOK_KEY" not in environment
    server = stack_keeper._api(settings, folder, state, 1, environment)
    assert server.environment["VOLLEY_WEBHOOK_KEY"] == "whsec_x"
    assert ApiSettings.model_validate_json(server.stdin).webhook_hosts == ("a.org",)
