"""A stand-in for the service, and commands run in this process."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.cli import main
from tests.unit.cli.commands import JOB, Volley
from tests.unit.fake_api import FakeApi, served


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeApi]:
    fake = FakeApi()
    for name in ("VOLLEY_TOKEN", "VOLLEY_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("VOLLEY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    with served(fake.app) as url:
        monkeypatch.setenv("VOLLEY_SERVER", url)
        yield fake


@pytest.fixture
def volley(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Volley:
    """Run one command; returns its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["volley", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    return file
