"""The process of an episode for `volley check`: how it ends, and what is kept of what it prints."""

import asyncio
import gc
import os
import signal
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from environments.records import Outcome
from services.runs.episode_trial import LINES, _in_process
from tests.integration.processes import wait_until_gone
from volley.processes import is_alive
from volley.rollout import EnvironmentWorkersSpec, ProgramRollout

PROGRAM = """
import os, subprocess, time

def leaves(row, base_url, api_key):
    return subprocess.Popen(["sleep", "130"]).pid

def detaches(row, base_url, api_key):
    return subprocess.Popen(["sleep", "130"], start_new_session=True).pid

def prints(row, base_url, api_key):
    for _ in range(64):
        os.write(1, (b"x" * 99 + b"\\n") * 10_000)
    raise ValueError("last words")

class Hangs:
    def __init__(self):
        print(subprocess.Popen(["sleep", "130"], start_new_session=True).pid, flush=True)
        time.sleep(130)

    def run(self, row, base_url, api_key):
        return 0.0
"""


async def episode(folder: Path, target: str, seconds: float = 60.0) -> tuple[Outcome, str]:
    (folder / "my_tried_agent.py").write_text(PROGRAM)
    asked: dict[str, Any] = {
        "rollout": ProgramRollout(target=f"my_tried_agent:{target}").model_dump(mode="json"),
        "workers": EnvironmentWorkersSpec().model_dump(mode="json"),
        **{"row": {}, "base_url": "http://127.0.0.1:1/v1", "api_key": "key", "timeout_s": 30.0},
    }
    return await _in_process(asked, seconds)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


async def test_what_a_program_leaves_running_ends_with_the_episode(folder: Path) -> None:
    outcome, _ = await asyncio.wait_for(episode(folder, "leaves"), 40)
    assert not outcome.failure
    wait_until_gone({int(outcome.reward or 0)})


def test_what_has_left_for_a_session_of_its_own_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    outcome, _ = asyncio.run(asyncio.wait_for(episode(folder, "detaches"), 40))
    gc.collect()
    pid = int(outcome.reward or 0)
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)
    assert not unraisable, "its pipes were closed before the event loop"


async def test_a_process_that_does_not_end_is_ended_whoever_holds_its_pipes(folder: Path) -> None:
    begun = time.monotonic()
    outcome, printed = await asyncio.wait_for(episode(folder, "Hangs", 10.0), 40)
    assert time.monotonic() - begun < 20
    assert (outcome.failure, outcome.kind) == ("the program did not end within 10 s", "timeout")
    os.kill(int(printed), signal.SIGKILL)


async def test_of_what_a_program_prints_the_last_lines_are_kept(folder: Path) -> None:
    tracemalloc.start()
    try:
        outcome, printed = await episode(folder, "prints")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outcome.failure == "the program raised ValueError: last words"
    assert printed.endswith("ValueError: last words")
    assert len(printed.splitlines()) == LINES
    assert peak < 8 << 20, "it printed 64 MB"
