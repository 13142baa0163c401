"""The local stack: Redis and Ray, started if missing, ended with the block."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.local_ray import ray_cluster
from services.local_redis import check_redis, embedded_redis
from services.needs import Needs


@dataclass(frozen=True, slots=True)
class Stack:
    """Addresses of what a run stands on."""

    redis_url: str
    ray_address: str


@contextlib.asynccontextmanager
async def local_stack(
    needs: Needs,
    folder: Path,
    *,
    redis_url: str | None = None,
    ray_address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> AsyncIterator[Stack]:
    """Redis at ``redis_url`` or embedded, Ray at ``ray_address`` or a local head; for the length of the block.

    Args:
        folder: where the embedded Redis keeps its data and log.
        runtime_env: what Ray brings to the processes of the run.

    Raises:
        HostError: one of them does not answer or does not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        if redis_url is None:
            redis_url = await stack.enter_async_context(embedded_redis(folder / "redis", folder / "redis.log"))
        else:
            await check_redis(redis_url)
        yield Stack(redis_url, stack.enter_context(ray_cluster(needs, ray_address, runtime_env=runtime_env)))
