"""One Redis per module, and an API server without tokens that uses it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.stack.redis import embedded_redis
from tests.integration.api.servers import Api, SilentLauncher, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    async with embedded_redis(folder / "data", folder / "redis.log") as url:
        yield url


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(redis_url: str, runs: Path) -> AsyncIterator[Api]:
    async with serving(redis_url, launcher=SilentLauncher(), runs=runs) as up:
        yield up
