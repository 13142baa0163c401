"""What every answer has, even that to a request that meets a bug."""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from services.api.app import create_app
from services.api.gate import HEADERS
from services.api.settings import ApiSettings


@contextlib.asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    ("broken", "route"),
    [("services.store.redis.Store.run_ids", "/v1/runs"), ("services.api.auth.Tokens.principal", "other")],
)
async def test_a_bug_is_counted_and_answered_like_any_other_problem(
    broken: str, route: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def bug(*_: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(broken, bug)
    app = create_app(ApiSettings(redis_url="redis://127.0.0.1:1", redis_retries=0))
    with caplog.at_level(logging.ERROR):
        async with client_of(app) as http:
            answer = await http.get("/v1/runs")
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:volley:problem:internal-error"
    assert "secret" not in answer.text
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
    assert answer.headers["cache-control"] == "no-store"
    counted = f'volley_api_requests_total{{method="GET",route="{route}",status="500"}} 1.0'
    assert counted in app.state.context.metrics.text(0, []).decode()
    assert "GET '/v1/runs' failed: KeyError" in caplog.text


async def test_a_bug_in_the_middle_of_an_answer_is_counted_as_one() -> None:
    app = create_app(ApiSettings(redis_url="redis://127.0.0.1:1", redis_retries=0))

    @app.get("/half")
    async def half() -> Any:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"half"
            raise KeyError("a secret")

        return StreamingResponse(pieces())

    async with client_of(app) as http:
        await http.get("/half")
    assert 'route="/half",status="500"} 1.0' in app.state.context.metrics.text(0, []).decode()
