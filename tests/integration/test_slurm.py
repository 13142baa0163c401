"""The batch script of deploy/slurm, with Slurm's commands replaced by stand-ins on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.integration.jobs import rl_job, write_inputs
from tests.integration.processes import descendants, wait_until_gone
from volley.ports import free_port

pytestmark = pytest.mark.integration

SCRIPT = Path("deploy/slurm/volley.sbatch").resolve()
COMMANDS = {
    "srun": 'while [[ $1 == -* ]]; do shift; done\nexec "$@"',
    "scontrol": 'tr , "\\n" <<<"$3"',
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that requires the resources offered by the script's nodes."""
    folder = tmp_path_factory.mktemp("slurm")
    write_inputs(folder)
    placed = rl_job(
        folder,
        steps=4,
        evaluation=None,
        actors={"max_num_seqs": 64, "resources": {"volley_actor": 1}},
        reward_workers={"count": 1, "resources": {"volley_reward": 1}},
        learner={"ranks": 1, "resources_per_rank": {"volley_learner": 1}},
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(placed))
    return folder / "job.yaml"


def environment(folder: Path, nodes: str) -> Mapping[str, str]:
    """The environment that Slurm gives a batch script on this many nodes."""
    commands = folder / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SLURM_"))},
        "RAY_worker_niceness": "0",
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path.cwd()),
        "VENV": sys.prefix,
        "PORT": str(free_port()),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_CPUS_PER_TASK": "4",
    }


def start(folder: Path, nodes: str, *arguments: str | Path) -> "subprocess.Popen[bytes]":
    """Start the script as Slurm does, with its output in ``out``."""
    with (folder / "out").open("wb") as out:
        command = ["bash", SCRIPT, *arguments]
        return subprocess.Popen(command, env=environment(folder, nodes), stdout=out, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("nodes", ["n0", "n0,n1"])
def test_a_run_on_an_allocation_ends_and_leaves_only_its_folder(job: Path, tmp_path: Path, nodes: str) -> None:
    script = start(tmp_path, nodes, job)
    seen: set[int] = set()
    deadline = time.monotonic() + 400
    while script.poll() is None and time.monotonic() < deadline:
        seen |= descendants(script.pid)
        time.sleep(1)
    script.kill()
    assert script.wait() == 0, (tmp_path / "out").read_text()[-3000:]
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["state"] == "done"
    assert (run / "model" / "config.json").exists()
    assert list(tmp_path.glob(".volley-*")) == []  # the token was deleted with the job
    wait_until_gone(seen, 60)


def test_an_allocation_without_a_node_for_actors_is_rejected(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEARNER_NODES", "2")
    assert start(tmp_path, "n0,n1", job).wait(30) == 1
    assert "LEARNER_NODES=2 leaves none of the 2 nodes for actors" in (tmp_path / "out").read_text()


def test_slurms_time_limit_ends_the_run_in_order(job: Path, tmp_path: Path) -> None:
    script = start(tmp_path, "n0", job, "--set", "steps=4000")
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("runs/*/metrics.jsonl")):
        assert script.poll() is None, (tmp_path / "out").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    seen = descendants(script.pid)
    script.send_signal(signal.SIGTERM)
    assert script.wait(120) == 143
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["state"] == "stopped"
    wait_until_gone(seen, 60)
