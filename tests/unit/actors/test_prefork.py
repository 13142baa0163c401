"""Processes forked by servers that import nothing heavy: what they inherit, and with whom they end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest

from actors.prefork_server import shared_server
from volley.forking import VARIABLE
from volley.job import ActorsSpec
from volley.processes import is_alive

PRELOAD = ["json"]
ENGINE = """
import json, os, tempfile, time
from volley.processes import die_with_starter

def engine(seconds):
    die_with_starter()
    about = {
        "pid": os.getpid(),
        "server": os.getppid(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("MY_")},
        "niceness": os.nice(0),
        "oom_score": open("/proc/self/oom_score_adj").read().strip(),
        "cores": list(os.sched_getaffinity(0)),
        "folder": os.getcwd(),
        "temporary": tempfile.gettempdir(),
    }
    print("from the engine", flush=True)
    with open("about.partial", "w") as file:
        json.dump(about, file)
    os.rename("about.partial", "about")
    time.sleep(seconds)
"""
ACTOR = """
import os, sys
from pathlib import Path
import engine
from actors import prefork
from volley import forking
from volley.job import ActorsSpec
from volley.processes import redirect_output

if __name__ == "__main__":
    prefork.PRELOAD, forking.FORK_SECONDS = ["json"], 2.0
    redirect_output(Path("log"))
    prefork.begin(ActorsSpec(threads=int(sys.argv[2])))
    process = prefork._Context().Process(target=engine.engine, args=(int(sys.argv[1]),))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


class Machine:
    """Starts actors in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._about = folder, folder / "about"
        (folder / "engine.py").write_text(ENGINE)
        (folder / "actor.py").write_text(ACTOR)

    def actor(self, seconds: int = 0, threads: int = 1, prefix: tuple[str, ...] = ()) -> "subprocess.Popen[bytes]":
        """An actor whose engine lives for ``seconds``."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("MY_")}
        path = f"{Path.cwd()}:{self.folder}"
        return subprocess.Popen(
            [*prefix, sys.executable, "actor.py", str(seconds), str(threads)],
            cwd=self.folder,
            env={**variables, "MY_NAME": "actor", "PYTHONPATH": path, "TMPDIR": str(self.folder)},
        )

    def about_engine(self) -> dict[str, Any]:
        """What the engine says of itself."""
        deadline = time.monotonic() + 60
        while not self._about.exists():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)
        about: dict[str, Any] = json.loads(self._about.read_text())
        self._about.unlink()
        return about


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv(VARIABLE, raising=False)
    return Machine(tmp_path)


@pytest.fixture
def server(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A shared server's process id. Its environment has what the actors' has not."""
    monkeypatch.setenv("MY_OTHER", "server")
    with shared_server(ActorsSpec(), PRELOAD):
        machine.actor().wait(60)
        yield machine.about_engine()["server"]


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.usefixtures("server")
def test_an_engine_of_a_shared_server_inherits_from_its_actor(machine: Machine) -> None:
    core = max(os.sched_getaffinity(0))
    with machine.actor(prefix=("nice", "-n", "3", "taskset", "-c", str(core), "choom", "-n", "77", "--")) as actor:
        about = machine.about_engine()
        assert actor.wait(60) == 0
    assert about["environment"] == {"MY_NAME": "actor"}
    assert about["niceness"] == min(19, os.nice(0) + 3)
    assert (about["oom_score"], about["cores"]) == ("77", [core])
    assert about["folder"] == about["temporary"] == str(machine.folder)
    assert (machine.folder / "log").read_text().endswith("from the engine\n")


def test_actors_share_a_server_if_they_would_import_the_same(machine: Machine, server: int) -> None:
    servers = []
    for threads in (1, 2, 1):
        with machine.actor(threads=threads):
            servers.append(machine.about_engine()["server"])
    assert servers[0] == servers[2] == server != servers[1]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
def test_an_engine_ends_with_its_killed_actor(
    machine: Machine, shared: bool, stopped: bool, request: pytest.FixtureRequest
) -> None:
    if shared:
        request.getfixturevalue("server")
    with machine.actor(600) as actor:
        engine = machine.about_engine()["pid"]
        if stopped:
            os.kill(engine, SIGSTOP)
        actor.kill()
        assert gone(engine)


@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP])
def test_an_actor_does_without_a_dead_or_hung_server(machine: Machine, server: int, signal: int) -> None:
    os.kill(server, signal)
    with machine.actor() as actor:
        assert machine.about_engine()["server"] != server
        assert actor.wait(60) == 0


def test_the_server_ends_with_its_block_and_leaves_no_file(machine: Machine) -> None:
    with shared_server(ActorsSpec(), PRELOAD):
        address = os.environ[VARIABLE]
        with shared_server(ActorsSpec(), PRELOAD):  # the outer one serves
            assert os.environ[VARIABLE] == address
        with machine.actor():
            server = machine.about_engine()["server"]
        assert is_alive(server)
    assert VARIABLE not in os.environ
    assert not Path(address).parent.exists()
    assert gone(server)


def test_a_delayed_server_imports_when_it_is_told_to(machine: Machine) -> None:
    with shared_server(ActorsSpec(), ["this"], delayed=True) as begin:
        log = Path(os.environ[VARIABLE]).parent / "log"
        with machine.actor() as actor:
            time.sleep(0.5)
            assert log.read_text() == "", "`import this` prints"
            begin()
            machine.about_engine()
            assert actor.wait(60) == 0
        assert "The Zen of Python" in log.read_text()


def test_there_is_none_for_gpus(machine: Machine) -> None:
    with shared_server(ActorsSpec(gpus=1), PRELOAD):
        assert VARIABLE not in os.environ
