"""`volley sweep` in a process of its own, interrupted by real signals between any two steps, and repeated."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from services.store.folder import RunFolder
from tests.hangup import hangup_counts
from tests.unit.test_sweep_files import write

ROOT = Path(__file__).parents[2]


def started(file: Path, *options: str) -> subprocess.Popen[str]:
    """A sweep that leads a process group, as a command of a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.sweep_process", "sweep", str(file), "--out", str(file.parent), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def begun(folder: Path, count: int) -> list[Path]:
    """Wait until this number of runs has begun to train."""
    for _ in range(6000):
        if len(found := [path.parent for path in sorted(folder.glob("*/metrics.jsonl"))]) >= count:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{count} runs did not begin")


def children(runs: Sequence[Path]) -> list[int]:
    return [int((run / "child").read_text()) for run in runs]


def steps(run: Path) -> list[int]:
    return [row["step"] for row in RunFolder(run).read("metrics")]


@pytest.mark.parametrize(
    ("number", "to_group", "option"),
    [
        *((signal.SIGINT, True, option) for option in ("", "--quiet", "--json")),
        (signal.SIGTERM, False, ""),
        (signal.SIGHUP, True, ""),
    ],
)
def test_an_interrupted_sweep_ends_its_runs_keeps_them_and_goes_on(
    tmp_path: Path, number: signal.Signals, to_group: bool, option: str
) -> None:
    file = write(tmp_path, grid={"objective.k": [2, 4, 8]}, seeds=[0], at_once=2)
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "hold").touch()
    with hangup_counts():
        command = started(file, *filter(None, [option]))
    runs = begun(folder, 2)
    pids = children(runs)
    assert all(map(psutil.pid_exists, pids))
    (os.killpg if to_group else os.kill)(command.pid, number)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 130, err
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(ProcessLookupError):
        os.killpg(command.pid, 0)
    assert [RunFolder(run).state for run in runs] == ["stopped"] * 2
    assert err.splitlines()[-1] == "volley: interrupted: repeat the command to continue"
    if option == "--json":
        assert out == ""

    (folder / "hold").unlink()
    again = started(file)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert {run.name: RunFolder(run).state for run in begun(folder, 3)} == dict.fromkeys(
        ("k-2-s0", "k-4-s0", "k-8-s0"), "done"
    )
    for run in begun(folder, 3):
        assert sorted(set(steps(run))) == [0, 1, 2, 3]
    assert "3 runs: 0 done, " in out
