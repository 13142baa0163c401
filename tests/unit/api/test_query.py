"""Query parameters that a route does not have are rejected, by every route of the API."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from services.api.app import create_app
from services.api.query import known_parameters
from services.api.settings import ApiSettings

NO_REDIS = ApiSettings(redis_url="redis://127.0.0.1:1", redis_retries=0, rate=10_000, burst=10_000)
PATHS = {"run_id": "nobody", "process": "actor-0", "name": "nobody"}
BODIES = {"/v1/runs": {"job": {}}, "/v1/jobs/check": {"job": {}}, "/v1/tokens": {"name": "made", "scope": "read"}}
APP = create_app(NO_REDIS)
ROUTES = [(method, route) for route in APP.routes if isinstance(route, APIRoute) for method in sorted(route.methods)]
NAMES = sorted({name for _, route in ROUTES for name in known_parameters(route)})


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """The application without its Redis: what gets past the checks of the request is answered with 503 or 404."""
    transport = httpx.ASGITransport(APP, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def test_the_routes_are_those_of_the_contract() -> None:
    assert {route.path for _, route in ROUTES} == set(APP.openapi()["paths"])
    assert len(ROUTES) > 25
    assert {"limit", "from", "tail", "tag", "who"} <= set(NAMES)


@pytest.mark.parametrize(("method", "route"), ROUTES, ids=[f"{method} {route.path}" for method, route in ROUTES])
async def test_every_route_rejects_the_parameters_of_all_others(
    http: httpx.AsyncClient, method: str, route: APIRoute
) -> None:
    known = [each.alias for each in get_flat_dependant(route.dependant).query_params]
    for name in {*NAMES, "nonsense", "", "Limit", "token"} - set(known):
        answer = await http.request(method, route.path.format(**PATHS), params={name: "1"}, json=BODIES.get(route.path))
        assert answer.status_code == 422, (name, answer.text)
        assert [error["pointer"] for error in answer.json()["errors"]] == [f"query/{name}"]
        detail = answer.json()["detail"]
        if known:
            assert detail.endswith(f"this route has {', '.join(known)}")
        else:
            assert detail.endswith("this route has no query parameters: leave it out")
    assert "422" in APP.openapi()["paths"][route.path][method.lower()]["responses"]


async def test_all_unknown_parameters_are_named_at_once_each_with_the_likely_one(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/audit?rnu=a&limit=5&rnu=b&whoo=c")
    assert answer.json()["detail"] == (
        "query/rnu: there is no such parameter; did you mean run? this route has run, who, limit, before; "
        "query/whoo: there is no such parameter; did you mean who? this route has run, who, limit, before"
    )


async def test_the_parameters_of_a_route_itself_get_through(http: httpx.AsyncClient) -> None:
    for query in ("tag=a=1&tag=b=2&limit=3&state=running", "cursor=&name=x&kind=rl&id_prefix=a"):
        assert (await http.get(f"/v1/runs?{query}")).json()["detail"].find("no such parameter") < 0
    assert (await http.get("/healthz")).status_code == 200
