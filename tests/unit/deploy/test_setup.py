"""What set-up says on a machine that lacks something it can neither install nor do without."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = ("bash", "basename", "cat", "cut", "dirname", "env", "id", "sed", "sha256sum")
# Answers as Python 3.12 without headers would; a word in each question tells which one it is.
WITHOUT_HEADERS = """#!/usr/bin/env bash
case "$2" in *Python.h*) exit 1 ;; *print*) echo 3.12 ;; esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A copy of the project with nothing but these tools: no compiler, no package manager."""
    shutil.copytree("deploy", tmp_path / "deploy")
    shutil.copy("pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        tool = shutil.which(name)
        assert tool is not None
        (tmp_path / "bin" / name).symlink_to(tool)
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    return tmp_path


def setup(machine: Path) -> tuple[str, str]:
    """Run a set-up that must fail; returns what it prints as advice and as its error."""
    bash = machine / "bin" / "bash"
    run = subprocess.run(
        [bash, machine / "deploy" / "setup.sh"], env={"PATH": str(machine / "bin")}, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert not (machine / ".venv").exists()
    return run.stdout, run.stderr


def test_a_compiler_that_is_missing_is_named(machine: Path) -> None:
    advice, error = setup(machine)
    assert advice.startswith("set-up: to compile pycosat, install gcc: sudo apt-get install gcc\n")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert error == f"set-up: a C compiler and Python's headers are needed: apt-get install gcc python{version}-dev\n"


def test_headers_that_are_missing_are_named(machine: Path) -> None:
    (machine / "bin" / "cc").symlink_to(sys.executable)
    (machine / "bin" / "python3").unlink()
    (machine / "bin" / "python3").write_text(WITHOUT_HEADERS)
    (machine / "bin" / "python3").chmod(0o755)
    advice, error = setup(machine)
    assert advice == "set-up: to compile pycosat, install python3.12-dev: sudo apt-get install python3.12-dev\n"
    assert error.endswith("apt-get install gcc python3.12-dev\n")


@pytest.mark.parametrize("script", [None, "#!/usr/bin/env bash\nexit 1\n"], ids=["missing", "of another version"])
def test_a_python_that_is_not_supported_is_refused(machine: Path, script: str | None) -> None:
    python = machine / "bin" / "python3"
    python.unlink()
    if script is not None:
        python.write_text(script)
        python.chmod(0o755)
    assert setup(machine) == (
        "",
        "set-up: Python 3.11 or 3.12 is needed; choose one with: make setup PYTHON=python3.11\n",
    )
