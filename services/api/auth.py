"""Who asks, and what they may: bearer tokens with one of three scopes, each of which includes the ones before it.

Redis holds names, scopes and SHA-256 digests (hash ``volley:tokens``). A token has 256 random bits, so a plain digest
is as good as a slow one.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from redis.exceptions import RedisError

from services.api.problems import Problem
from services.api.schemas import MadeToken, Scope, TokenView
from volley.errors import HostError

KEY = "volley:tokens"
SCOPES: tuple[Scope, ...] = ("read", "operate", "admin")
FRESH_SECONDS = 2.0  # a token revoked at another server is refused here after so long
LONGEST_TOKEN = 512


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request comes from."""

    name: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


ANYBODY = Principal("anybody", "admin")


class Tokens:
    """The tokens of all servers on one Redis.

    Args:
        redis: a client as of `services.store.connect`.
        admin_token: the bootstrap token; it is never stored.
        guarded: False: a request without a token may do everything.
    """

    def __init__(self, redis: Any, admin_token: str | None, *, guarded: bool) -> None:
        self.guarded = guarded
        self._redis = redis
        self._bootstrap = digest(admin_token) if admin_token else None
        self._known: dict[str, tuple[str, Principal]] = {}
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def principal(self, token: str | None) -> Principal | None:
        """Whose token it is; None for nobody's. Raises `HostError` where Redis never told its tokens."""
        if not self.guarded:
            return ANYBODY
        if not token or len(token) > LONGEST_TOKEN:
            return None
        given = digest(token)
        if self._bootstrap is not None and hmac.compare_digest(given, self._bootstrap):
            return Principal("bootstrap", "admin")
        await self._refresh()
        found = None
        for stored, principal in self._known.values():  # all of them, so that time tells nothing
            if hmac.compare_digest(given, stored):
                found = principal
        return found

    async def all(self) -> list[TokenView]:
        stored = await self._do(self._redis.hgetall(KEY))
        views = [TokenView(name=name, **_public(json.loads(text))) for name, text in stored.items()]
        return sorted(views, key=lambda view: view.created)

    async def make(self, name: str, scope: Scope) -> MadeToken:
        """A new token; raises `Problem` 409 where there is one of that name."""
        token, created = f"volley_{secrets.token_urlsafe(32)}", time.time()
        entry = json.dumps({"sha256": digest(token), "scope": scope, "created": created})
        if not await self._do(self._redis.hsetnx(KEY, name, entry)):
            raise Problem(409, "token-exists", f"there is a token {name}: delete it first, or choose another name")
        self._read_at = None
        return MadeToken(name=name, scope=scope, created=created, token=token)

    async def delete(self, name: str) -> None:
        """Raises `Problem` 404 where there is none of that name."""
        if not await self._do(self._redis.hdel(KEY, name)):
            raise Problem(404, "no-such-token", f"there is no token {name}")
        self._read_at = None

    async def any(self) -> bool:
        """Could anybody come in at all?"""
        return self._bootstrap is not None or bool(await self._do(self._redis.hlen(KEY)))

    async def _refresh(self) -> None:
        async with self._reading:
            if self._read_at is not None and time.monotonic() - self._read_at < FRESH_SECONDS:
                return
            try:
                stored = await self._do(self._redis.hgetall(KEY))
            except HostError:
                if not self._known:
                    raise
                return  # those known go on working while Redis is away
            self._known = {
                name: (entry["sha256"], Principal(name, entry["scope"]))
                for name, entry in ((name, json.loads(text)) for name, text in stored.items())
            }
            self._read_at = time.monotonic()

    async def _do(self, call: Any) -> Any:
        try:
            return await call
        except (RedisError, OSError) as error:
            raise HostError(f"Redis is away: {error}") from error


def digest(token: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer(header: bytes | None) -> str | None:
    """The token in an ``Authorization`` header."""
    scheme, _, token = (header or b"").partition(b" ")
    return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else None


class Needs(HTTPBearer):
    """A dependency: the route needs a scope. The gate has found out whose the request is."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scheme_name="token", auto_error=False, description="scopes: read, operate, admin")
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        principal: Principal = request.state.principal
        if not principal.may(self.scope):
            raise Problem(403, "scope-too-small", f"this needs the scope {self.scope}, the token has {principal.scope}")


READ, OPERATE, ADMIN = (Depends(Needs(scope)) for scope in SCOPES)


def _public(entry: dict[str, Any]) -> dict[str, Any]:
    return {"scope": entry["scope"], "created": entry["created"]}
