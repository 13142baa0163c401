"""The benchmark of episodes, made small: it measures all its turns."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def test_plain_samples_and_episodes_take_turns() -> None:
    command = [sys.executable, "-m", "benchmarks.episodes.speed", "--rounds", "1"]
    small = ["--episodes", "2", "--more", "8", "--calls", "2", "--tokens", "4", "--wait", "0"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sides = ("2 plain samples", "2 episodes ", "2 episodes, 0 s", "8 episodes, 0 s")
    rows = [line for line in done.stdout.splitlines() if line.startswith(sides)]
    assert len(rows) == len(sides), done.stdout
    assert all(row.count(" ms") == 3 for row in rows[1:]), "added to a call, its longest, and the gateway's part"
