"""Weights pass through files in memory, which other processes can open and which cannot be left behind."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from volley.errors import HostError
from volley.memory import available_memory
from volley.weight_files import WeightFile, close_all, closing_all, opened


def test_another_process_reads_what_was_written() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    with closing_all() as files:
        files.append(WeightFile(data))
        code = (
            f"import hashlib, pathlib; print(hashlib.sha256(pathlib.Path({files[0].path!r}).read_bytes()).hexdigest())"
        )
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        assert seen == hashlib.sha256(data.tobytes()).hexdigest()
        np.testing.assert_array_equal(files[0].read(), data)


def test_another_process_fills_an_empty_file() -> None:
    with closing_all() as files:
        files.append(WeightFile())
        code = f"import pathlib; pathlib.Path({files[0].path!r}).write_bytes(bytes(range(5)))"
        subprocess.run([sys.executable, "-c", code], check=True)
        np.testing.assert_array_equal(files[0].read(), np.arange(5, dtype=np.uint8))


def test_files_have_no_name_and_are_closed_after_an_error() -> None:
    paths: list[Path] = []

    def fail() -> None:
        with closing_all() as files:
            files.append(WeightFile(np.zeros(4096, dtype=np.uint8)))
            paths.append(Path(files[0].path))
            assert paths[0].exists()
            assert not list(Path("/dev/shm").glob("*volley*"))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not paths[0].exists()


def test_too_little_memory_is_a_clear_error() -> None:
    free = available_memory()
    huge = np.broadcast_to(np.zeros(1, dtype=np.uint8), (4 * free,))  # an array view that takes no memory
    with pytest.raises(HostError, match=r"MiB of weights do not fit into .* MiB of free memory: lower actors.count"):
        WeightFile(huge)


def test_opened_files_outlive_their_owner() -> None:
    files = [WeightFile(np.full(3, number, dtype=np.uint8)) for number in range(2)]
    with opened([file.path for file in files]) as paths:
        for file in files:
            file.close()
        others = [WeightFile(np.full(3, 9, dtype=np.uint8)) for _ in range(2)]  # get the numbers that are free now
        assert [Path(path).read_bytes() for path in paths] == [bytes([0] * 3), bytes([1] * 3)]
    assert not any(Path(path).exists() for path in paths)
    close_all(others)


def test_files_of_a_process_that_is_gone_cannot_be_opened() -> None:
    file = WeightFile(np.zeros(3, dtype=np.uint8))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError), opened([file.path, f"/proc/{2**22 + 1}/fd/3"]):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    file.close()


def test_a_file_that_cannot_be_written_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr("os.write", full)
    with pytest.raises(OSError, match="No space left"):
        WeightFile(np.zeros(3, dtype=np.uint8))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
