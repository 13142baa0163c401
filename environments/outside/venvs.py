"""Virtual environments for programs: one folder each, with the requirements it was made from beside its packages."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from volley.errors import HostError, JobError

REQUIREMENTS = "requirements.txt"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Venv:
    """An environment.

    Attributes:
        requirements: one per line, as they were given.
    """

    name: str
    folder: Path
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def for_job(self) -> str:
        """The interpreter as a job names it, with ``~`` for the home folder."""
        home = Path.home()
        return f"~/{self.python.relative_to(home)}" if self.python.is_relative_to(home) else str(self.python)


def create(
    folder: Path, name: str, requirements: Sequence[str], file: Path | None = None, python: str | None = None
) -> Venv:
    """Make the environment ``folder/name`` and install packages, with uv if it is there, otherwise with pip.

    What the installer prints goes to standard error. Nothing is left of one that fails.

    Args:
        requirements: packages to install.
        file: further ones, as pip reads them.
        python: interpreter, or for uv also a version; None: the one that runs Volley.

    Raises:
        JobError: the name is not one, there is such an environment, or ``file`` cannot be read.
        HostError: the environment cannot be made, or a requirement cannot be installed.
    """
    place = _place(folder, name)
    listed = [*(_lines(file) if file is not None else ()), *requirements]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        place.mkdir()
    except FileExistsError:
        raise JobError(f"{place} exists: choose another name, or remove it with `volley env rm {name}`") from None
    try:
        _make(place, python or sys.executable, [*requirements, *(("-r", str(file)) if file is not None else ())])
        (place / REQUIREMENTS).write_text("".join(f"{each}\n" for each in listed))
    except BaseException:
        shutil.rmtree(place)
        raise
    return Venv(name, place, tuple(listed))


def find(folder: Path) -> list[Venv]:
    """The environments in ``folder``, by name."""
    made = sorted(path.parent for path in folder.glob(f"*/{REQUIREMENTS}"))
    return [Venv(each.name, each, tuple((each / REQUIREMENTS).read_text().splitlines())) for each in made]


def remove(folder: Path, name: str) -> None:
    """Delete an environment. Raises `JobError` if no environment has this name."""
    place = _place(folder, name)
    if not (place / "pyvenv.cfg").is_file():
        names = ", ".join(each.name for each in find(folder)) or "none"
        raise JobError(f"{folder} has no environment {name!r}; there is {names}")
    shutil.rmtree(place)


def _lines(file: Path) -> list[str]:
    """The lines of a file of requirements, without comments."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise JobError(f"requirements {file}: {getattr(problem, 'strerror', None) or problem}") from None
    found = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in found if line]


def _place(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise JobError(f"{name!r} is not a name for an environment: use letters, digits, '.', '_' and '-'")
    return folder / name


def _make(place: Path, python: str, packages: list[str]) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    made = str(place / "bin" / "python")
    if uv is not None:
        _call([uv, "venv", "--quiet", "--allow-existing", "--python", python, str(place)])
        install = [uv, "pip", "install", "--quiet", "--python", made]
    else:
        _call([python, "-m", "venv", str(place)])
        install = [made, "-m", "pip", "install", "--quiet"]
    if packages:
        _call([*install, *packages])


def _call(command: list[str]) -> None:
    """Run an installer. Raises `HostError` if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, env=environment).returncode
    except OSError as problem:
        raise HostError(f"{command[0]} cannot be started ({problem.strerror}): name another with --python") from None
    if code != 0:
        raise HostError(
            f"the environment was not made: `{shlex.join(command)}` failed with exit code {code}; see above"
        )
