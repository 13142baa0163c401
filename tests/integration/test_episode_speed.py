"""The benchmarks of episodes, made small: they measure all that they print."""

import re
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


def test_the_gateway_is_measured_with_an_engine_that_idles() -> None:
    command = [sys.executable, "-m", "benchmarks.episodes.gateway", "--rounds", "1"]
    small = ["--episodes", "2", "--calls", "2", "--seconds", "0.05"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    form = r"^ *(\d+) at once: ([\d.]+) \(.*\) ms per call; the process computes ([\d.]+) \(.*\) ms per call$"
    found = re.findall(form, done.stdout, re.MULTILINE)
    assert [int(count) for count, *_ in found] == [1, 2], done.stdout
    assert all(float(each) > 0 for _, *added in found for each in added)
