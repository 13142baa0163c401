"""A cluster that starts without a node for any role: a waiting run makes Ray's autoscaler add the nodes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.stack.redis import embedded_redis
from services.store.redis import Store
from tests.integration.jobs import rl_job, write_inputs
from tests.integration.processes import descendants
from volley.ports import free_port

pytestmark = pytest.mark.integration

VOLLEY = str(Path(sys.executable).with_name("volley"))
RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
GROUPS = ("volley_actor", "volley_learner", "volley_reward")
GCS = "where the head is"
HEAD = {"ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}}
AUTOSCALER = {
    "cluster_name": "volley-test",
    "max_workers": 3,
    "head_node_type": "ray.head.default",
    "idle_timeout_minutes": 5,
    # All nodes are processes with the same address.
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "gcs_address": GCS,
    },
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{
        key: []
        for key in (
            "cluster_synced_files",
            "initialization_commands",
            "setup_commands",
            "head_setup_commands",
            "worker_setup_commands",
            "head_start_ray_commands",
            "worker_start_ray_commands",
        )
    },
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A head with Ray's own autoscaler, whose nodes are processes here; yields the environment that reaches it."""
    size = {"CPU": 2, "object_store_memory": 128 << 20}
    types = {
        name: {"resources": {**size, name: 1}, "node_config": {}, "min_workers": 0, "max_workers": 1} for name in GROUPS
    }
    config = tmp_path / "autoscaler.json"
    address = f"127.0.0.1:{free_port()}"
    config.write_text(json.dumps(AUTOSCALER | {"available_node_types": HEAD | types}).replace(GCS, address))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path.cwd()),
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "of-this-test-alone-0123456789abcdef",
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_raylet_start_wait_time_s": "120",
    }
    options = [f"--port={address.partition(':')[2]}", "--num-cpus=0", f"--object-store-memory={256 << 20}"]
    options += ["--node-ip-address=127.0.0.1", f"--autoscaling-config={config}", "--include-dashboard=false"]
    with (tmp_path / "head.log").open("wb") as log:
        command = [*RAY, "start", "--head", "--block", *options]
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 150
        while subprocess.run([*RAY, "health-check"], env=environment, capture_output=True, check=False).returncode:
            assert head.poll() is None, (tmp_path / "head.log").read_text()[-3000:]
            assert time.monotonic() < deadline
        yield environment
    finally:
        family = descendants(head.pid)
        head.terminate()
        head.wait(60)
        # The nodes it added, and their Ray helpers, notice only after minutes that the head has ended.
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_a_waiting_run_is_given_its_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    """`volley run` on a cluster that lacks all resources but can grow is not rejected."""
    write_inputs(tmp_path)
    job = rl_job(
        tmp_path,
        steps=2,
        evaluation=None,
        actors={"max_num_seqs": 64, "resources": {"volley_actor": 1}},
        reward_workers={"count": 1, "resources": {"volley_reward": 1}},
        learner={"ranks": 1, "resources_per_rank": {"volley_learner": 1}},
    )
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    waits: set[str] = set()
    async with embedded_redis(tmp_path / "redis", tmp_path / "redis.log") as url, Store(url) as store:
        command = [VOLLEY, "run", str(file), "--out", str(tmp_path / "runs"), "--redis", url]
        with (tmp_path / "run.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, env=cluster, stdout=log, stderr=log)
        over = asyncio.create_task(process.wait())
        try:
            deadline = time.monotonic() + 400
            while not over.done() and time.monotonic() < deadline:
                for run in await store.run_ids():
                    seen = await store.observed(run)
                    waits |= {seen.problem} if seen.state == "pending" else set()
                await asyncio.sleep(0.2)
        finally:
            if not over.done():
                process.kill()
            await over
        assert process.returncode == 0, (tmp_path / "run.log").read_text()
        (run,) = await store.run_ids()
        ended = await store.observed(run)
    assert (ended.state, ended.problem) == ("done", "")
    assert len((tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()) == 2
    assert any(wait.startswith("waits for room on the cluster: the job reserves") for wait in waits)
