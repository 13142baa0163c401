"""`volley env`: environments made, listed and removed, with uv and with pip, from a package on this machine."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from environments.outside import venvs
from services.cli import app
from volley.errors import HostError, JobError


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package with one module."""
    info = "tiny_env-1.0.dist-info"
    files = {
        "tiny_env.py": "ANSWER = 42\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-env\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    made = tmp_path / "tiny_env-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return made


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_an_environment_is_made_from_packages_and_files(
    wheel: Path, tmp_path: Path, installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installer == "pip":
        monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    elif shutil.which("uv", path=str(Path(sys.executable).parent)) is None and shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    monkeypatch.chdir(tmp_path)
    Path("needs.txt").write_text(f"# packages\n./{wheel.name}  # ours\n")
    made = venvs.create(tmp_path / "envs", "tiny", [], Path("needs.txt"))
    said = subprocess.run(
        [made.python, "-c", "import tiny_env; print(tiny_env.ANSWER)"], capture_output=True, text=True
    )
    assert said.stdout == "42\n"
    assert venvs.find(tmp_path / "envs") == [made]
    assert made.requirements == (f"./{wheel.name}",)


def test_the_commands(wheel: Path, tmp_path: Path) -> None:
    def volley(*args: str) -> str:
        result = CliRunner().invoke(app, ["env", *args, "--dir", str(tmp_path)], catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    python = tmp_path / "envs" / "tiny" / "bin" / "python"
    assert volley("create", "tiny", "--with", str(wheel)) == f"in a job: rollout: {{python: {python}, ...}}\n"
    assert json.loads(volley("ls", "--json")) == [
        {"name": "tiny", "python": str(python), "requirements": [str(wheel)]},
    ]
    assert "tiny" in volley("ls")
    assert volley("rm", "tiny") == "tiny: removed\n"
    assert "no environments" in volley("ls")


def test_interpreters_under_the_home_folder_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert venvs.Venv("a", tmp_path / ".volley" / "envs" / "a", ()).for_job == "~/.volley/envs/a/bin/python"


def test_nothing_is_left_of_what_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HostError, match="failed with exit code"):
        venvs.create(tmp_path, "a", [str(tmp_path / "missing-1.0-py3-none-any.whl")])
    assert "missing" in capfd.readouterr().err
    with pytest.raises(HostError):
        venvs.create(tmp_path, "a", [], python=str(tmp_path / "python"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "", ".a", "-a", "a/b", "a b"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    for call in (lambda: venvs.create(tmp_path, name, []), lambda: venvs.remove(tmp_path, name)):
        with pytest.raises(JobError, match="is not a name"):
            call()


def test_what_exists_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(JobError, match="volley env rm a"):
        venvs.create(tmp_path, "a", [])
    with pytest.raises(JobError, match="no environment 'a'; there is none"):
        venvs.remove(tmp_path, "a")
    with pytest.raises(JobError, match=r"requirements .*no\.txt: No such file"):
        venvs.create(tmp_path, "b", [], tmp_path / "no.txt")
