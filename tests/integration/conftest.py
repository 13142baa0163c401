"""Real processes, started once a module where they can be shared."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_local() -> Iterator[None]:
    """A local Ray head on the loopback interface, with more logical CPUs than the tests reserve."""
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        object_store_memory=512 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
