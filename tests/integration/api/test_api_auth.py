"""Authorization: every route with every scope, stored tokens, and requests that must be rejected."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute

from services.api.app import create_app
from services.api.auth import SCOPES, RequiredScope
from services.api.settings import ApiSettings
from services.store.redis import TOKENS_KEY, Store
from tests.integration.api.servers import ADMIN, Api, a_job, serving
from volley.errors import HostError

pytestmark = pytest.mark.integration

PUBLIC = {"/healthz", "/readyz"}
BODIES = {
    "/v1/runs": {"job": a_job()},
    "/v1/jobs/check": {"job": a_job()},
    "/v1/tokens": {"name": "made", "scope": "read"},
}


def routes() -> Iterator[tuple[str, str, str | None]]:
    """Method, path and required scope of every route."""
    for route in create_app(ApiSettings(redis_url="redis://127.0.0.1:1")).routes:
        if isinstance(route, APIRoute):
            scopes = [need.call.scope for need in route.dependant.dependencies if isinstance(need.call, RequiredScope)]
            assert len(scopes) <= 1
            for method in route.methods:
                yield method, route.path, scopes[0] if scopes else None


ROUTES = sorted(routes(), key=str)


def test_every_route_has_the_right_scope() -> None:
    for method, path, scope in ROUTES:
        if path in PUBLIC:
            assert scope is None
        elif path.startswith(("/v1/tokens", "/v1/audit")) or method == "DELETE":
            assert scope == "admin"
        else:
            assert scope == ("read" if method == "GET" else "operate"), path


async def test_every_route_accepts_only_sufficient_scopes(redis_url: str) -> None:
    async with serving(redis_url, admin_token=ADMIN) as api:
        tokens = {None: None, "wrong": "volley_wrong"}
        for scope in SCOPES:
            made = await api.http.post("/v1/tokens", json={"name": f"the-{scope}", "scope": scope})
            assert made.status_code == 201, made.text
            tokens[scope] = made.json()["token"]
        for method, path, needed in ROUTES:
            for has, token in tokens.items():
                headers = {"Authorization": f"Bearer {token}" if token else ""}
                where = path.format(run_id="nobody", process="actor-0", name="nobody")
                status = await status_of(api, method, where, headers, BODIES.get(path))
                if needed is None:
                    assert status == 200, (method, path, has)
                elif has in (None, "wrong"):
                    assert status == 401, (method, path, has)
                elif SCOPES.index(has) < SCOPES.index(needed):
                    assert status == 403, (method, path, has)
                else:
                    assert status in (200, 201, 202, 204, 404, 409, 422), (method, path, has, status)


async def status_of(api: Api, method: str, path: str, headers: dict[str, str], body: object) -> int:
    """Only the status, because a live view does not end."""
    async with api.http.stream(method, path, headers=headers, json=body) as answer:
        return answer.status_code


async def test_a_token_is_shown_once_and_stored_as_a_digest(redis_url: str) -> None:
    async with serving(redis_url, admin_token=ADMIN) as api:
        made = (await api.http.post("/v1/tokens", json={"name": "ci", "scope": "operate"})).json()
        listed = (await api.http.get("/v1/tokens")).json()["items"]
        assert [token["scope"] for token in listed if token["name"] == "ci"] == ["operate"]
        assert all("token" not in token for token in listed)
        async with Store(redis_url) as store:
            stored = await store._redis.hgetall(TOKENS_KEY)
        assert made["token"] not in str(stored)
        assert ADMIN not in str(stored)
        assert (await api.http.post("/v1/tokens", json={"name": "ci", "scope": "read"})).status_code == 409
        own = {"Authorization": f"Bearer {made['token']}"}
        assert (await api.http.get("/v1/runs", headers=own)).status_code == 200
        assert (await api.http.delete("/v1/tokens/ci")).status_code == 204
        assert (await api.http.get("/v1/runs", headers=own)).status_code == 401, "revocation takes effect immediately"
        assert (await api.http.delete("/v1/tokens/ci")).status_code == 404


async def test_a_token_revoked_through_another_server_is_soon_rejected(redis_url: str) -> None:
    async with serving(redis_url, admin_token=ADMIN) as one, serving(redis_url, admin_token=ADMIN) as other:
        made = (await one.http.post("/v1/tokens", json={"name": "both", "scope": "read"})).json()
        own = {"Authorization": f"Bearer {made['token']}"}
        async with asyncio.timeout(5):
            while (await other.http.get("/v1/runs", headers=own)).status_code == 401:  # noqa: ASYNC110 - another server
                await asyncio.sleep(0.1)
        await one.http.delete("/v1/tokens/both")
        async with asyncio.timeout(5):
            while (await other.http.get("/v1/runs", headers=own)).status_code == 200:  # noqa: ASYNC110 - another server
                await asyncio.sleep(0.1)


async def test_the_scheme_is_case_insensitive(redis_url: str) -> None:
    async with serving(redis_url, admin_token=ADMIN) as api:
        for scheme in ("Bearer", "bearer", "BEARER"):
            answer = await api.http.get("/v1/runs", headers={"Authorization": f"{scheme} {ADMIN}"})
            assert answer.status_code == 200


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Basic YTpi", f"Basic {ADMIN}", ADMIN, f"Bearer {ADMIN}x", f"Bearer {'a' * 5000}"],
)
async def test_invalid_tokens_are_rejected(redis_url: str, header: str) -> None:
    async with serving(redis_url, admin_token=ADMIN) as api:
        answer = await api.http.get("/v1/runs", headers={"Authorization": header})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await api.http.get(f"/v1/runs?token={ADMIN}", headers={"Authorization": ""})).status_code == 401


async def test_a_server_that_others_can_reach_does_not_start_without_tokens(redis_url: str) -> None:
    async with Store(redis_url) as store:
        await store._redis.delete(TOKENS_KEY)
    for admin_token, starts in ((None, False), (ADMIN, True)):
        app = create_app(
            ApiSettings.model_validate({"redis_url": redis_url, "host": "0.0.0.0", "admin_token": admin_token})
        )
        lifespan = app.router.lifespan_context(app)
        if starts:
            async with lifespan:
                pass
        else:
            with pytest.raises(HostError, match="other machines can reach"):
                await lifespan.__aenter__()


async def test_no_token_is_logged(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="services")
    caplog.set_level(logging.DEBUG, logger="uvicorn")
    async with serving(redis_url, admin_token=ADMIN) as api:
        made = (await api.http.post("/v1/tokens", json={"name": "quiet", "scope": "read"})).json()
        await api.http.get("/v1/runs", headers={"Authorization": f"Bearer {made['token']}"})
        await api.http.get("/v1/runs", headers={"Authorization": "Bearer volley_unknown"})
    assert made["token"] not in caplog.text
    assert ADMIN not in caplog.text
    assert "volley_unknown" not in caplog.text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]:80", ""]
)
async def test_an_unknown_host_name_is_rejected(api: Api, host: str) -> None:
    for path in ("/v1/runs", "/", "/metrics"):
        assert (await api.http.get(path, headers={"Host": host})).status_code == 421
    assert (await api.http.get("/healthz", headers={"Host": host})).status_code == 200, (
        "health probes use an address as host name"
    )


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:1", "[::1]:8000", "[::1]"])
async def test_the_names_of_this_machine_are_accepted(api: Api, host: str) -> None:
    assert (await api.http.get("/v1/runs", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_requests_from_other_sites_change_nothing(api: Api, headers: dict[str, str]) -> None:
    answer = await api.http.post("/v1/runs", json={"job": a_job("forged")}, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:volley:problem:cross-site")
    assert "access-control-allow-origin" not in answer.headers
    own = {"Origin": api.url, "Sec-Fetch-Site": "same-origin"}
    assert (await api.http.post("/v1/jobs/check", json={"job": a_job()}, headers=own)).status_code == 200
    assert (await api.http.get("/v1/runs", params={"name": "forged"})).json()["items"] == []


async def test_every_answer_has_the_security_headers(api: Api) -> None:
    for path in ("/", "/healthz", "/v1/runs", "/v1/runs/nobody", "/nowhere", "/v1/runs?limit=0"):
        headers = (await api.http.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == ("no-store" if path.startswith("/v1/") else "no-cache")
