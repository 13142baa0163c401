"""Ray workers forked from a server: what they are like, what ends with them, and who does without a server."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest
import ray

from actors.environment import engine_environment
from actors.prefork_server import shared_server
from services.stack.launcher import PRELOAD
from tests.integration.conftest import started_cluster, without_token
from tests.integration.probe import Probe
from volley.forking import FROM, VARIABLE, ray_options
from volley.job import ActorsSpec
from volley.processes import is_alive

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def head() -> Iterator[None]:
    """A head and a server of its own, and a connection to it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.delenv(VARIABLE, raising=False)
        stack.enter_context(shared_server(ActorsSpec(), [*PRELOAD, "this"]))
        cluster = stack.enter_context(started_cluster(num_cpus=8))
        stack.enter_context(without_token())
        ray.init(address=str(cluster.address), log_to_driver=False, logging_level="error")
        stack.callback(ray.shutdown)
        yield


def start(**options: Any) -> tuple[Any, dict[str, Any]]:
    """An actor, and what it tells of itself."""
    actor = ray.remote(Probe).options(num_cpus=0, **options).remote()
    return actor, ray.get(actor.about.remote(), timeout=120)


def gone(pid: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.mark.usefixtures("head")
def test_a_worker_is_forked_if_it_may_be() -> None:
    forked, plain = start(**ray_options())[1], start()[1]
    assert forked["imported"]
    assert not plain["imported"]
    assert forked["parent"] != plain["parent"]
    assert forked["job"] == plain["job"]
    assert forked["title"] == plain["title"] == "ray::Probe.about"
    assert forked["environment"][FROM] == os.environ[VARIABLE]
    different = {
        name for name in forked["environment"] if forked["environment"][name] != plain["environment"].get(name)
    }
    assert different <= {FROM, "RAY_JOB_ID"}  # the plain one may have been started before


@pytest.mark.usefixtures("head")
def test_a_forked_rank_can_compile() -> None:
    """Although engines, which are forked from the same server, compile nothing."""
    assert ray.get(start(**ray_options())[0].graphs.remote(), timeout=300) > 0


@pytest.mark.usefixtures("head")
def test_a_runtime_environment_of_the_users_own_is_kept() -> None:
    (own,) = (options["runtime_env"]["env_vars"] for options in [ray_options()])
    about = start(runtime_env={"env_vars": {**own, "OMP_NUM_THREADS": "3"}})[1]
    assert not about["imported"]
    assert about["environment"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.usefixtures("head")
def test_variables_of_the_service_are_kept_and_do_not_prevent_forking() -> None:
    (own,) = (options["runtime_env"]["env_vars"] for options in [ray_options()])
    given = {"VOLLEY_REDIS_URL": "redis://127.0.0.1:1/0", "RAY_JOB_STOP_WAIT_TIME_S": "61"}
    about = start(runtime_env={"env_vars": {**own, **given}})[1]
    assert about["imported"]
    assert given.items() <= about["environment"].items()


@pytest.mark.usefixtures("head")
@pytest.mark.parametrize("stopped", [True, False])
def test_worker_and_launcher_end_together(stopped: bool) -> None:
    _, killed = start(**ray_options())
    assert is_alive(killed["launcher"])
    os.kill(killed["pid"], SIGKILL)
    assert gone(killed["launcher"])
    _, other = start(**ray_options())
    if stopped:
        os.kill(other["pid"], SIGSTOP)
    os.kill(other["launcher"], SIGKILL)
    assert gone(other["pid"])


@pytest.mark.usefixtures("head")
def test_ray_ends_a_forked_worker() -> None:
    actor, about = start(**ray_options())
    assert is_alive(about["launcher"])
    ray.kill(actor)
    assert gone(about["pid"])
    assert gone(about["launcher"])


@pytest.mark.usefixtures("head")
def test_a_worker_starts_without_a_server(tmp_path: Path) -> None:
    name = Path(os.environ[VARIABLE]).name
    (tmp_path / name).touch()
    for address in (tmp_path / name, tmp_path / "missing"):
        assert not start(runtime_env={"env_vars": {FROM: str(address)}})[1]["imported"]


def test_the_server_has_what_actors_and_ranks_need_but_neither_ray_nor_a_thread() -> None:
    """Ray keeps what it reads from the environment as it is imported; a fork has only the thread that forks."""
    told = "print([m in sys.modules for m in ('vllm', 'deepspeed', 'ray')], len(os.listdir('/proc/self/task')))"
    found = subprocess.run(
        [sys.executable, "-c", f"import os, sys, services.stack.preload; {told}"],
        env=os.environ | engine_environment(ActorsSpec()),
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.endswith("[True, True, False] 1\n")
