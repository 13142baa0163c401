"""A private Ray cluster on this machine, for one benchmark."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_ray(*, cpus: int, store_bytes: int) -> Iterator[None]:
    """Start Ray on the loopback address with ``cpus`` logical CPUs; it is shut down after the block."""
    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()
