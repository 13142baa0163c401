"""The checks that every request passes before it reaches a route, in this order:

    host name -> cross-site? -> token -> rate -> body: size, time, JSON -> route -> security headers

Any web page can make a browser on this machine send requests. The host name is checked to prevent DNS rebinding, and
requests that change something are rejected if another site's page sent them.
"""

import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_servers.http_gate import LOOPBACK_HOSTS, PROBES, SAFE, from_another_site, host_name
from services.api.auth import Tokens, bearer, digest
from services.api.limits import RateLimiter, bounded, check_json, read_body, replayed
from services.api.problems import Problem, away, internal_error
from services.api.settings import ApiSettings
from volley.errors import HostError

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_RAW = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

Observe = Callable[[str, str, int, float], None]  # method, route, status, seconds


class Gate:
    """ASGI middleware; it uses ``tokens`` only while the application is up."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, tokens: Tokens, observe: Observe) -> None:
        self.app, self.settings, self.tokens, self.observe = app, settings, tokens, observe
        self.rate = RateLimiter(settings.rate, settings.burst)
        self._any_host = not settings.loopback and not settings.hosts
        self._hosts = LOOPBACK_HOSTS | {host.lower() for host in (settings.host, *settings.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, started = time.perf_counter(), 500, False

        async def guarded_send(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                # The dashboard's files change with a release, so browsers must revalidate them; most answers are 304.
                caching = b"no-store" if scope["path"].startswith("/v1/") else b"no-cache"
                message["headers"] = [*message.get("headers", ()), *_RAW, (b"cache-control", caching)]
            await send(message)

        try:
            await self._answer(scope, receive, guarded_send)
        except Exception as error:  # a bug, which the server logs with its traceback
            if not started:
                await internal_error(scope, error).response()(scope, receive, guarded_send)
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.observe(scope["method"], route, status, time.perf_counter() - begun)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            receive = await self._admit(scope, receive)
        except Problem as problem:
            await problem.response()(scope, receive, send)
        except HostError as error:
            await away(error).response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["path"] not in PROBES:
            self._check_host(headers)
        if scope["method"] not in SAFE and from_another_site(headers):
            raise Problem(403, "cross-site", "a page of another site sent this request")
        await self._check_client(scope, headers)
        if scope["method"] in SAFE:
            return bounded(receive, self.settings.max_body)
        most, seconds = self.settings.max_body, self.settings.body_seconds
        body = await read_body(receive, headers.get(b"content-length"), most, seconds)
        if body:
            await check_json(body, headers.get(b"content-type", b""))
        return replayed(body, receive)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if not self._any_host and host_name(headers.get(b"host", b"")) not in self._hosts:
            raise Problem(
                421, "wrong-host", "the server does not have this host name: start it with: volley up --known-as HOST"
            )

    async def _check_client(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        token = bearer(headers.get(b"authorization"))
        principal = await self.tokens.principal(token) if token or not self.tokens.guarded else None
        client = f"token {digest(token)}" if token and principal else f"address {(scope.get('client') or ('',))[0]}"
        if wait := self.rate.wait(client):
            raise Problem(
                429, "too-many-requests", f"try again in {wait:.1f} s", headers={"Retry-After": str(math.ceil(wait))}
            )
        scope.setdefault("state", {})["principal"] = principal
        if principal is None and needs_token(scope["path"]):
            detail = "send Authorization: Bearer TOKEN" if token is None else "there is no such token"
            raise Problem(401, "no-valid-token", detail, headers={"WWW-Authenticate": "Bearer"})


def needs_token(path: str) -> bool:
    """Return whether ``path`` needs a token; health, readiness, the OpenAPI document and the dashboard do not."""
    return path.startswith("/v1/") or path == "/metrics"
