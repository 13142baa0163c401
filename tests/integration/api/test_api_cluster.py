"""The cluster view of a real Ray head whose REST API requires a token."""

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

from services.api.cluster import RayCluster
from tests.integration.api.servers import make_run, observe, serving
from volley.errors import HostError
from volley.ports import free_port

pytestmark = pytest.mark.integration

HEAD = """
import sys, ray
port, folder = sys.argv[1:]
ray.init(
    address="local", num_cpus=6, object_store_memory=100 << 20, include_dashboard=True, dashboard_port=int(port),
    log_to_driver=False, logging_level="error", _node_ip_address="127.0.0.1", _temp_dir=folder,
)
@ray.remote(num_cpus=1.5)
class Holder:
    def there(self):
        return True
holder = Holder.remote()
ray.get(holder.there.remote())
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, str]]:
    """Address and token of a Ray head with 6 CPUs, 1.5 of them in use."""
    token, port = secrets.token_urlsafe(32), free_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="vr", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD, str(port), folder],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n"
            yield f"http://127.0.0.1:{port}", token
        finally:
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


async def test_the_view_shows_nodes_and_the_runs_on_them(redis_url: str, head: tuple[str, str]) -> None:
    address, token = head
    async with RayCluster(address, token) as cluster, serving(redis_url, cluster=cluster) as api:
        run_id = await make_run(api, actors={"cpus": 0.5})
        await observe(redis_url, run_id, state="running", actors=3, updated=time.time())
        async with asyncio.timeout(40):
            while True:  # a node reports its usage every few seconds
                answer = await api.http.get("/v1/cluster")
                assert answer.status_code == 200, answer.text
                (node,) = answer.json()["nodes"]
                if node["available"].get("CPU") == 4.5:
                    break
                await asyncio.sleep(0.5)
        assert (node["alive"], node["resources"]["CPU"]) == (True, 6.0)
        assert set(node["available"]) == set(node["resources"])
        holders = [each for each in answer.json()["holders"] if each["run"] == run_id]
        assert holders == [{"run": run_id, "role": "actor", "count": 3, "cpus": 1.5, "gpus": 0.0}]
        assert (await api.http.get("/readyz")).status_code == 200
        assert [node["CPU"] for node in await cluster.resources_by_node() or ()] == [6.0], "for the queue"


async def test_the_memory_of_its_only_node_is_that_of_this_machine(head: tuple[str, str]) -> None:
    async with RayCluster(*head) as cluster, asyncio.timeout(40):
        while not (found := await cluster.memory_by_node()):  # noqa: ASYNC110 - a node reports every few seconds
            await asyncio.sleep(0.5)
    assert 0 < found[0] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert len(found) == 1


async def test_an_unreachable_cluster_is_reported(redis_url: str, head: tuple[str, str]) -> None:
    for address, token in ((head[0], "wrong"), (f"http://127.0.0.1:{free_port()}", "any")):
        async with RayCluster(address, token) as cluster:
            with pytest.raises(HostError, match="Ray at"):
                await cluster.nodes()
            async with serving(redis_url, cluster=cluster) as api:
                away = await api.http.get("/readyz")
                assert (away.status_code, [error["pointer"] for error in away.json()["errors"]]) == (503, ["ray"])
                assert (await api.http.get("/v1/cluster")).status_code == 503
                assert (await api.http.get("/v1/runs")).status_code == 200
