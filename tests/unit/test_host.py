"""What a job needs from its host, and a clear error if the host lacks it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from services.cli.doctor import examine
from services.jobs.needs import GIB, Needs, check_host, needs_of
from volley.errors import HostError
from volley.job import RLJob


def job(model: Path, **changes: Any) -> RLJob:
    return RLJob.model_validate(
        {
            "name": "x",
            "steps": 1,
            "model": {"path": model},
            "data": {"path": model / "d.jsonl"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "mean"},
            **changes,
        }
    )


def test_needs_grow_with_every_role_and_with_the_model(tmp_path: Path) -> None:
    small = needs_of(job(tmp_path))
    more = needs_of(job(tmp_path, actors={"count": 2}, learner={"ranks": 2}, reward_workers={"count": 3}))
    assert more.cpus == pytest.approx(small.cpus + 1 + 1 + 0.2)
    assert more.memory_bytes > small.memory_bytes + 2 * GIB
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    assert needs_of(job(tmp_path)).memory_bytes - small.memory_bytes == (1 + 5 + 2) << 20


def test_too_little_memory_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.jobs.needs.available_memory", lambda: 2 * GIB)
    with pytest.raises(HostError, match=r"needs about 3\.0 GiB of memory and 2\.0 GiB are free: lower actors\.count"):
        check_host(Needs(1, 0, 3 * GIB, 1), tmp_path)


def test_too_little_shared_memory_is_a_clear_error(tmp_path: Path) -> None:
    free = shutil.disk_usage("/dev/shm").free
    with pytest.raises(HostError, match="--shm-size"):
        check_host(Needs(1, 0, 1, free + GIB), tmp_path)


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage

    def full(path: Any) -> Any:
        return real(path)._replace(free=1 << 20) if Path(path) == tmp_path else real(path)

    monkeypatch.setattr("services.jobs.needs.shutil.disk_usage", full)
    with pytest.raises(HostError, match=r"has 0\.0 GiB of disk left"):
        check_host(Needs(1, 0, 1, 1), tmp_path)


def test_a_host_that_can_run_volley_has_no_blocking_finding() -> None:
    assert [finding for finding in examine() if finding.blocks] == []


def test_a_missing_package_is_reported_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.doctor.PACKAGES", ("no_such_package",))
    (finding,) = [finding for finding in examine() if finding.blocks]
    assert (finding.what, finding.state) == ("no_such_package", "not installed")
    assert "make setup" in finding.fix
