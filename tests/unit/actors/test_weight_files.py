"""Weights travel in files that other processes can open and nobody can leave behind."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from actors.weight_files import WeightFile, available_memory, closing_all
from volley.errors import HostError


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


def test_another_process_fills_an_empty_one() -> None:
    with closing_all() as files:
        files.append(WeightFile())
        code = f"import pathlib; pathlib.Path({files[0].path!r}).write_bytes(bytes(range(5)))"
        subprocess.run([sys.executable, "-c", code], check=True)
        np.testing.assert_array_equal(files[0].read(), np.arange(5, dtype=np.uint8))


def test_they_have_no_name_and_are_gone_after_an_error() -> None:
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


def test_no_room_is_one_clear_line() -> None:
    free = available_memory()
    assert free is not None
    huge = np.broadcast_to(np.zeros(1, dtype=np.uint8), (4 * free,))  # takes no memory itself
    with pytest.raises(
        HostError, match=r"MiB of weights do not fit into the .* MiB of free memory: lower actors.count"
    ):
        WeightFile(huge)
