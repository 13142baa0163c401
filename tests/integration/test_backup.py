"""A backup is taken while a run trains, then everything is lost; after restoring, the run completes exactly."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.jobs import unhurried_job, write_inputs
from tests.integration.test_service import Service, check_exact, rows

pytestmark = pytest.mark.integration

STEPS = 60


def backup(home: Path, copy: Path, code: int = 0) -> str:
    done = subprocess.run(["bash", "deploy/backup.sh", home, copy], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr


def test_a_run_continues_from_a_backup_taken_while_it_trained(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    file = inputs / "job.yaml"
    file.write_text(yaml.safe_dump(unhurried_job(inputs, steps=STEPS, checkpoint={"every": 5})))
    service, copy = Service(tmp_path), tmp_path / "copies" / "monday"
    service.up()
    try:
        run = service.json("submit", str(file))["id"]
        service.wait(run, lambda now: now["step"] >= 20)
        backup(service.home, copy)
        kept = max(int(path.name.removeprefix("step-")) for path in (copy / "runs" / run / "checkpoints").iterdir())
        assert "exists already" in backup(service.home, copy, code=1)
        service.wait(run, lambda now: now["step"] >= kept + 20)  # these steps are not in the backup

        service.run("down")
        shutil.rmtree(service.home)
        shutil.copytree(copy, service.home)
        service.up()
        after = service.wait(run, lambda now: now["life"] == 2 and now["state"] in ("running", "done"))
        assert after["step"] >= kept
        service.wait(run, lambda now: now["state"] == "done")
        view = service.json("show", run)
    finally:
        service.run("down")
    folder = Path(view["folder"])
    check_exact(folder, view, STEPS)
    assert [row["step"] for row in rows(folder / "events.jsonl") if row["kind"] == "resumed"] == [kept]
    assert (folder / "model" / "model.safetensors").exists()
