"""Logs: their end, what follows an offset, and the command that follows a growing log."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from services.cli import follow
from services.cli.sources import ServiceRun
from services.store.logs import Piece, read_log
from tests.unit.fake_api import FakeApi, served
from volley.client import Client


def log(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "actor-0.log").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("most", "text"),
    [
        (100, "one\ntwo\nthree\n"),
        (10, "two\nthree\n"),  # begins at the start of a line
        (9, "three\n"),
        (6, "three\n"),
        (3, "ee\n"),  # the line is too long, so its end is shown
    ],
)
def test_the_end_of_a_log_begins_with_a_whole_line_if_one_fits(tmp_path: Path, most: int, text: str) -> None:
    assert read_log(log(tmp_path, b"one\ntwo\nthree\n"), "actor-0", most) == Piece(text, 14)


def test_pieces_from_successive_offsets_make_up_the_whole_log(tmp_path: Path) -> None:
    said = "déjà\nvu ☃\U0001f40e\n" * 20
    folder = log(tmp_path, said.encode())
    for most in (1, 4, 5, 7, 64):
        heard, at = "", 0
        while (piece := read_log(folder, "actor-0", most, at)) and piece.text:
            heard, at = heard + piece.text, piece.next
        assert (heard, at) == (said, len(said.encode()))


def test_a_partial_character_waits_and_a_truncated_log_is_read_from_its_start(tmp_path: Path) -> None:
    folder = log(tmp_path, b"a\xe2\x98")
    assert read_log(folder, "actor-0", 64) == read_log(folder, "actor-0", 64, 0) == Piece("a", 1)
    log(tmp_path, b"a\xe2\x98\x83")
    assert read_log(folder, "actor-0", 64, 1) == Piece("☃", 4)
    assert read_log(folder, "actor-0", 64, 99) == Piece("a☃", 4)
    assert read_log(folder, "actor-1", 64, 0) is None


def test_following_a_log_prints_everything_appended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeApi()
    fake.add("a", state="running")
    growth = iter([" and more\n", "x" * 100 + "\n"])  # the second is longer than one piece may be

    def grow(_: float) -> None:
        try:
            fake.log += next(growth)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(follow, "LOG_BYTES", 16)
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=grow))
    with served(fake.app) as url, Client(url) as client, pytest.raises(KeyboardInterrupt):
        follow.follow_log(ServiceRun(client.run("a")), "driver", 5, as_json=False)
    assert capsys.readouterr().out == "there and more\n" + "x" * 100 + "\n"
