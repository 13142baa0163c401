"""Files and folders are either replaced completely or left unchanged."""

from pathlib import Path

import pytest

from volley.errors import HostError
from volley.files import empty_folder, new_folder, partial_path, replace_folder, replace_text, replacing


def test_a_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for text in ("old", "néw"):
        replace_text(file, text)
        assert file.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [file]


def test_readers_see_the_old_file_until_the_block_ends(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with replacing(file) as out:
        out.write(b"new")
        out.flush()
        assert file.read_text() == "old"
    assert file.read_text() == "new"


def test_a_file_is_unchanged_if_its_replacement_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(TypeError), replacing(file) as out:
        out.writelines([b"half", "not bytes"])  # type: ignore[list-item]
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_private_file_is_private_even_if_it_replaces_a_public_one(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    for path in (secret, partial_path(secret)):  # the second is left by a killed writer
        path.write_text("left")
        path.chmod(0o644)
    replace_text(secret, "token", mode=0o600)
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("token", 0o600)


def test_a_folder_is_replaced_completely(tmp_path: Path) -> None:
    folder = tmp_path / "step-4"
    for name in ("old", "new"):
        partial = partial_path(folder)
        partial.mkdir()
        (partial / "left by a killed writer").touch()
        empty_folder(partial)
        (partial / "inner").mkdir()
        (partial / "inner" / name).write_text(name)
        replace_folder(partial, folder)
        assert [path.name for path in folder.rglob("*")] == ["inner", name]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_new_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    with new_folder(folder) as partial:
        (partial / "weights").write_text("w")
        assert not folder.exists()
    assert (folder / "weights").read_text() == "w"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("error", [KeyError("x"), OSError(28, "No space left on device")])
def test_nothing_is_left_of_a_new_folder_if_its_block_fails(tmp_path: Path, error: Exception) -> None:
    folder = tmp_path / "tiny"

    def fail() -> None:
        with new_folder(folder) as partial:
            (partial / "half").touch()
            raise error

    with pytest.raises((KeyError, HostError)) as raised:
        fail()
    if isinstance(error, OSError):
        assert str(raised.value) == f"{folder} cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_replaces_an_empty_one_and_nothing_else(tmp_path: Path) -> None:
    empty, full, file = (tmp_path / name for name in ("empty", "full", "file"))
    empty.mkdir()
    full.mkdir()
    (full / "theirs").touch()
    file.touch()
    with new_folder(empty) as partial:
        (partial / "ours").touch()
    assert (empty / "ours").exists()
    for taken in (full, file):
        with pytest.raises(HostError, match="exists already: choose another folder"), new_folder(taken):
            pytest.fail("the block must not run")
    assert (full / "theirs").exists()
    assert file.is_file()
