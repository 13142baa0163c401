"""Output redirection, log tails, liveness checks, and processes that die with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from volley.processes import death_cause, is_alive, last_lines

REDIRECTS = """
import subprocess, sys
from pathlib import Path
from volley.processes import redirect_output
print("before")
redirect_output(Path(sys.argv[1]))
print("from the process", flush=True)
subprocess.run(["sh", "-c", "echo from its child >&2"])
"""
REPLIES = """
from volley.processes import take_stdout
replies = take_stdout()
print("printed")
replies.write("reply\\n")
"""
PARENT = """
import functools, signal, subprocess, sys, time
from volley.processes import die_with_parent
die = functools.partial(die_with_parent, *map(signal.Signals, {signals}))
child = subprocess.Popen(["sleep", "60"], preexec_fn=die)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_output_of_a_process_and_its_children_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    log.parent.mkdir()
    log.write_text("earlier\n")
    done = subprocess.run([sys.executable, "-c", REDIRECTS, str(log)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\n", "")
    assert log.read_text() == "earlier\nfrom the process\nfrom its child\n"


def test_only_replies_go_to_the_original_standard_output() -> None:
    done = subprocess.run([sys.executable, "-c", REPLIES], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("reply\n", "printed\n")


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_bytes(b"\xff one\n")
    assert last_lines(log) == "\ufffd one"
    log.write_text("\n".join(f"line {i}" for i in range(100_000)))
    assert last_lines(log, 2) == "line 99998\nline 99999"


@pytest.mark.parametrize("signals", [[], [signal.SIGTERM]])
def test_a_child_dies_with_its_parent(signals: list[signal.Signals]) -> None:
    code = PARENT.format(signals=[int(each) for each in signals])
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_zombie_does_not_count_as_alive() -> None:
    assert is_alive(os.getpid())
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists()
        assert not is_alive(process.pid)
    assert not is_alive(process.pid)


def test_the_cause_of_a_death_is_told_without_rays_identifiers() -> None:
    notice = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Rank\n\tactor_id: a9f4\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\nWorker exit detail: "
        "Worker exits unexpectedly.\n"
    )
    assert death_cause(notice) == (
        "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly."
    )
    assert death_cause("The actor is temporarily unavailable:\n  RpcError") == (
        "The actor is temporarily unavailable: RpcError"
    )
    assert death_cause("x" * 900, most=30) == "x" * 30
