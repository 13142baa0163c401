"""Scratch folders are removed by their process, or by the next one if it was killed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from volley.scratch import OWNER, own, scratch_folder, sweep

HOLDS = """
import sys, time
from pathlib import Path
from volley.scratch import own
lock = own(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_scratch_folder_is_private_and_removed_after_the_block(place: Path) -> None:
    with scratch_folder("redis") as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sweep(place) == []
        assert folder.is_dir()
    assert not folder.exists()


def test_the_folder_of_a_killed_process_is_removed_by_the_next(place: Path) -> None:
    left = place / "volley-1-left"
    command = [sys.executable, "-c", HOLDS, str(left)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert sweep(place) == [], "its owner is alive"
        holder.send_signal(signal.SIGKILL)
    assert (left / OWNER).exists()
    lock = own(place / "volley-2-new")
    assert [path.name for path in place.iterdir()] == ["volley-2-new"]
    os.close(lock)


def test_other_folders_are_not_touched(place: Path) -> None:
    (place / "volley-notes").mkdir()  # without an owner file, so not ours
    (place / "volley-file").touch()
    target = place / "target"
    os.close(own(target))
    (place / "volley-link").symlink_to(target)
    assert sweep(place) == []
    assert {path.name for path in place.iterdir()} == {"volley-notes", "volley-file", "volley-link", "target"}
