"""The built wheel, installed outside the repository: its packages must be imported from it and be complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("volley", "actors", "environments", "learner", "reward_servers", "services")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that no build folder appears in the repository.
    source = folder / "source"
    listing = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(listing, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if Path(name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(Path(name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, capture_output=True, check=True)
    (wheel,) = folder.glob("volley_rl-*.whl")
    uv = Path(sys.executable).parent / "uv"
    target = folder / "site"
    install = [str(uv), "pip", "install", "--no-deps", "--target", str(target), "--python", sys.executable, str(wheel)]
    subprocess.run(install, capture_output=True, check=True)
    return target


def run(site: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=site.parent, env=environment
    )
    return done.stdout


def test_every_package_comes_from_the_wheel(site: Path) -> None:
    code = f"import importlib\nfor name in {PACKAGES!r}: print(importlib.import_module(name).__file__)"
    found = run(site, code).splitlines()
    assert found == [str(site / name / "__init__.py") for name in PACKAGES]


def test_the_dashboard_is_complete(site: Path) -> None:
    listing = ["git", "ls-files", "-co", "--exclude-standard", "services/dashboard"]
    files = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    assert "services/dashboard/index.html" in files
    assert [name for name in files if not (site / name).is_file()] == []


def test_the_command_and_the_type_marker_are_installed(site: Path) -> None:
    assert "rl" in run(site, "import sys; sys.argv = ['volley', 'schema']; import services.cli; services.cli.main()")
    assert all((site / name / "py.typed").exists() for name in PACKAGES)
    entry_points = next(site.glob("volley_rl-*.dist-info")) / "entry_points.txt"
    assert "vllm.general_plugins" in entry_points.read_text()
