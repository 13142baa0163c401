"""Scratch folders end with their process: by its own hand, or by the next one's."""

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


def test_a_folder_is_its_owners_alone_and_goes_with_the_block(place: Path) -> None:
    with scratch_folder("redis") as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sweep(place) == []
        assert folder.is_dir()
    assert not folder.exists()


def test_what_a_killed_process_left_the_next_one_removes(place: Path) -> None:
    left = place / "volley-1-left"
    command = [sys.executable, "-c", HOLDS, str(left)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert sweep(place) == [], "its owner lives"
        holder.send_signal(signal.SIGKILL)
    assert (left / OWNER).exists()
    lock = own(place / "volley-2-new")
    assert [path.name for path in place.iterdir()] == ["volley-2-new"]
    os.close(lock)


def test_folders_of_others_are_left_alone(place: Path) -> None:
    (place / "volley-notes").mkdir()  # no owner's file: none of ours
    (place / "volley-file").touch()
    target = place / "target"
    os.close(own(target))
    (place / "volley-link").symlink_to(target)
    assert sweep(place) == []
    assert {path.name for path in place.iterdir()} == {"volley-notes", "volley-file", "volley-link", "target"}
