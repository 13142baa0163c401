"""A private Ray cluster on this machine, for one benchmark."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_ray(*, cpus: int, store_bytes: int | None = None) -> Iterator[None]:
    """Start Ray on the loopback address; it is shut down after the block.

    Args:
        cpus: logical ones.
        store_bytes: size of the object store, by default Ray's.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # as in a run; with Ray's 15, anything else that runs goes first
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
