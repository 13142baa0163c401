"""The server follows its contract: schemathesis makes requests from /openapi.json and checks every answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from services.api.app import create_app
from services.api.settings import ApiSettings
from services.stack.redis import embedded_redis
from services.store.redis import Store
from tests.integration.api.servers import ADMIN, SilentLauncher, a_record, driver, flushed, serving
from volley.state import Observed

pytestmark = pytest.mark.integration

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    ignored_auth,
    unsupported_method,
]
RUN = "known-20260101-000000-abcd"
document = create_app(ApiSettings(redis_url="redis://127.0.0.1:1")).openapi()
schema = schemathesis.openapi.from_dict(document).exclude(path_regex=r"/live$")  # their answers do not end


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in its own thread, because schemathesis blocks while it waits for answers."""
    folder = tmp_path_factory.mktemp("contract")
    ready, over, addresses = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with embedded_redis(folder / "data", folder / "redis.log") as redis_url:
            await fill(redis_url, folder)
            launcher = SilentLauncher()
            async with serving(redis_url, launcher=launcher, admin_token=ADMIN, rate=10_000, burst=10_000) as api:
                addresses.append(api.url)
                ready.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield addresses[0]
    over.set()
    thread.join(30)


async def fill(redis_url: str, folder: Path) -> None:
    """Create a run with an entry in every stream."""
    async with Store(redis_url) as store:
        await store.create(*a_record(RUN, folder))
        await store.put_observed(RUN, Observed(state="running", step=2))
    async with driver(redis_url, RUN) as outbox:
        outbox.step({"step": 0, "reward_mean": 0.5, "lag_histogram": {"0": 1}}, {"admitted": 1})
        outbox.add("events", {"kind": "tick", "time": 1.0})
        outbox.add("samples", {"step": 0, "group": 0, "status": "passed", "reward": 1.0, "prompt_id": "p"})
        outbox.add("evaluations", {"version": 0, "estimates": []})
        outbox.add("timeline", {"step": 0, "time": 1.0, "spans": []})
        await flushed(outbox)


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_follow_the_contract(case: schemathesis.Case[Any], url: str) -> None:
    if "run_id" in case.path_parameters and case.meta and case.meta.generation.mode.is_positive:
        case.path_parameters["run_id"] = RUN
    headers = {"Authorization": f"Bearer {ADMIN}"}
    case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, timeout=20)


def test_every_operation_is_named_and_described() -> None:
    operations = [each for path in document["paths"].values() for each in path.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    for each in operations:
        assert each["description"], each["operationId"]
        for status, answer in each["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == ["application/problem+json"], (each["operationId"], status)
