"""Redis and Ray for a single run: started if needed, and ended with the block."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.prefork_server import shared_server
from services.jobs.needs import Needs
from services.stack.launcher import PRELOAD
from services.stack.ray import ray_cluster
from services.stack.redis import check_redis, embedded_redis
from volley.job import ActorsSpec


@dataclass(frozen=True, slots=True)
class Stack:
    """The addresses of a run's Redis and Ray."""

    redis_url: str
    ray_address: str


@contextlib.contextmanager
def importing_ahead(actors: ActorsSpec | None, ray_address: str | None) -> Iterator[None]:
    """Within the block, import what the actors and ranks of a local head need, which takes seconds, in the background.

    Begin it before the job is checked: the check takes one core, and the imports another.
    """
    if actors is None or ray_address or os.environ.get("RAY_ADDRESS"):
        yield
        return
    with shared_server(actors, PRELOAD):
        yield


@contextlib.asynccontextmanager
async def local_stack(
    needs: Needs,
    folder: Path,
    *,
    redis_url: str | None = None,
    ray_address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> AsyncIterator[Stack]:
    """Yield Redis at ``redis_url`` or embedded, and Ray at ``ray_address`` or a local head.

    Args:
        folder: folder for the embedded Redis's data and log.
        runtime_env: Ray's runtime environment for the processes of the run.

    Raises:
        HostError: one of them does not answer or does not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        if redis_url is None:
            redis_url = await stack.enter_async_context(embedded_redis(folder / "redis", folder / "redis.log"))
        else:
            await check_redis(redis_url)
        stack.enter_context(importing_ahead(needs.actors, ray_address))
        yield Stack(redis_url, stack.enter_context(ray_cluster(needs, ray_address, runtime_env=runtime_env)))
