"""The Compose file: images that exist, secrets that must be set, a reward container that reaches only the run."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

HERE = Path("deploy/compose")
COMPOSE: dict[str, Any] = yaml.safe_load((HERE / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_images_are_targets_of_the_dockerfile() -> None:
    targets = re.findall(r"^FROM \S+ AS (\S+)$", Path("deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in targets
            assert service["image"] == f"volley:0.1.0-{service['build']['target']}"
            assert (HERE / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        else:
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+\S*", service["image"])


def test_everything_a_service_refers_to_exists() -> None:
    for service in SERVICES.values():
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{[^}]*\}", "./runs", volume).split(":")[0]
            assert source.startswith("./") or source in COMPOSE["volumes"]
        for option in service.get("security_opt", ()):
            if option.startswith("seccomp="):
                assert (HERE / option.removeprefix("seccomp=")).is_file()


def test_each_profile_has_one_node_for_actors_and_learner() -> None:
    for profile in ("cpu", "gpu"):
        nodes = [each for each in SERVICES.values() if each.get("profiles") == [profile]]
        assert len(nodes) == 1
        assert "volley_actor" in nodes[0]["command"]
        assert "volley_learner" in nodes[0]["command"]


def test_only_the_api_has_a_port_and_only_on_the_loopback_interface() -> None:
    assert COMPOSE["networks"]["ray"] == {"internal": True}
    for name, service in SERVICES.items():
        if name == "api":
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        else:
            assert "ports" not in service
            assert service["networks"] == ["ray"]
        assert service["cap_drop"] == ["ALL"]
        assert not service.get("privileged", False)
    assert "volumes" not in SERVICES["rewards"]
    assert "VOLLEY_ADMIN_TOKEN" not in str(SERVICES["rewards"])
    assert "REDIS_PASSWORD" not in str(SERVICES["rewards"])


def test_no_command_line_holds_a_secret() -> None:
    for service in SERVICES.values():
        command = str(service.get("command", ""))
        assert "--requirepass" not in command
        assert "--redis" not in command


def test_secrets_are_created_once_and_cover_all_variables(tmp_path: Path) -> None:
    for name in ("make-secrets.sh", "example.env"):
        shutil.copy(HERE / name, tmp_path)
    made = [_secrets(tmp_path) for _ in range(2)]
    assert made[0] == made[1]
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    known = dict(line.split("=", 1) for line in made[0].splitlines() if "=" in line and line[0] != "#")
    asked = set(re.findall(r"(?<!\$)\$\{(\w+)", (HERE / "compose.yaml").read_text()))
    assert asked == set(known)
    assert len({known[name] for name in ("RAY_AUTH_TOKEN", "REDIS_PASSWORD", "VOLLEY_ADMIN_TOKEN")}) == 3
    assert all(known.values())


def _secrets(folder: Path) -> str:
    subprocess.run(["bash", "make-secrets.sh"], cwd=folder, check=True, capture_output=True)
    return (folder / ".env").read_text()
