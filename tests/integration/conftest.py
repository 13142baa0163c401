"""Real processes, started once and shared where they can be, and the order in which the test files run."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from actors.prefork_server import shared_server
from services.stack.ephemeral import Stack
from services.stack.launcher import PRELOAD
from services.stack.launcher.raylet import forking_workers
from services.stack.redis import embedded_redis
from volley.job import ActorsSpec

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

# `make test` runs two files at a time. The longest come first, so that no lane ends long before the other, and files
# that start engines alternate with files that mostly wait, so that the lanes seldom want all cores at once.
FIRST = (
    "test_steering.py",
    "test_tensor_parallel_runs.py",
    "test_page_commands.py",
    "test_attacks.py",
    "test_service.py",
    "test_rehearsal.py",
    "test_shared_cluster.py",
    "test_backup.py",
    "test_slurm.py",
    "test_cluster.py",
    "test_faults.py",
    "test_demo_llm.py",
    "test_driver.py",
    "test_openenv.py",
    "test_reward_pool.py",
    "test_real_run.py",
    "test_reward_http.py",
    "test_sft_resume.py",
    "test_pages.py",
    "test_program_runs.py",
    "test_verifiers.py",
    "test_tensor_parallel.py",
    "test_evasions.py",
    "test_tool_runs.py",
    "test_runs.py",
    "test_notebook.py",
    "test_autoscaling.py",
    "test_actors_survive.py",
    "test_actors.py",
    "test_eval_resume.py",
    "test_gpu_benchmark.py",
    "test_lora.py",
    "test_environment_pool.py",
    "test_learner_ranks.py",
    "test_rft.py",
    "test_reasoning_gym.py",
    "test_weight_groups.py",
    "test_layers.py",
    "test_large.py",
    "test_code_scorer.py",
    "test_trl.py",
    "test_api_limits.py",
    "test_serve.py",
    "test_gateway.py",
    "test_live.py",
    "test_learner_faults.py",
    "test_lora_ranks.py",
    "test_supervisor.py",
    "test_learner_memory.py",
    "test_math_scorer.py",
    "test_learner_options.py",
)


LIBRARIES = "LD_LIBRARY_PATH"
_stack, _libraries = contextlib.ExitStack(), os.environ.get(LIBRARIES)


def pytest_configure(config: pytest.Config) -> None:
    """Let the engines of all lanes be forked from one server, and give Ray's workers the usual priority."""
    os.environ |= {"RAY_worker_niceness": "0"}  # as in a stack of the service
    if config.getoption("numprocesses", None):
        _stack.enter_context(shared_server(ActorsSpec(), PRELOAD))


def pytest_unconfigure() -> None:
    """End the server."""
    _stack.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of `FIRST` first; the order of the tests within a file stays."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Undo what cv2 does where vLLM imports it: actors with another variable would not use the server of all lanes."""
    os.environ.pop(LIBRARIES, None)
    if _libraries is not None:
        os.environ[LIBRARIES] = _libraries


@pytest.fixture(scope="session")
def ray_head() -> Iterator[str]:
    """A Ray head for all tests of this process, with more logical CPUs than they reserve: its address."""
    with started_cluster(num_cpus=16, object_store_memory=512 << 20) as cluster:
        yield str(cluster.address)


@contextlib.contextmanager
def started_cluster(**head: int) -> Iterator["Cluster"]:
    """A Ray cluster that consists of a head with these resources, until more nodes are added."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
    from ray.cluster_utils import Cluster

    without = {
        "include_dashboard": False,
        "dashboard_port": None,  # of a port that is taken, Ray leaves the socket open that it tries it with
        "include_log_monitor": False,
    }
    with without_token(), forking_workers():
        cluster = Cluster(initialize_head=True, head_node_args={**head, **without})
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def ray_local(ray_head: str) -> Iterator[None]:
    """A connection to the shared head; all that a module started there ends with it."""
    import ray

    with without_token():
        ray.init(address=ray_head, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
async def stack(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The shared head, and a Redis of the module's own."""
    folder = tmp_path_factory.mktemp("redis")
    async with embedded_redis(folder / "data", folder / "redis.log") as url:
        yield Stack(url, "local")


@contextlib.contextmanager
def without_token() -> Iterator[None]:
    """Ray without authentication, which a local head leaves switched on in the process that started it.

    A driver with it turns the shared head's calls away; the head then takes the driver for dead and ends its actors.
    """
    from ray._private.authentication_test_utils import reset_auth_token_state

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        reset_auth_token_state()
        yield
    reset_auth_token_state()
