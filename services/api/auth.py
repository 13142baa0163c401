"""Authentication and authorisation: bearer tokens with one of three scopes, each including the ones before it.

Redis holds names, scopes and SHA-256 digests (hash ``volley:tokens``). A token has 256 random bits, so a plain digest
is as good as a slow one.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from redis.exceptions import RedisError, WatchError

from services.api.problems import Problem
from services.api.shared import SharedRead
from services.store.readable import limits_of, readable
from services.store.redis import TOKENS_KEY, Client, add_audit, answer
from volley.errors import HostError
from volley.state import MAX_PRIORITY, AuditRecord, Limits
from volley.views import MadeToken, Scope, TokenView, useless_limits

log = logging.getLogger(__name__)

NO_LIMITS = Limits()
SCOPES: tuple[Scope, ...] = ("read", "operate", "admin")
FRESH_SECONDS = 2.0  # a token that another server revoked may work here for this long
RECHECK_SECONDS = 5.0  # between two looks at the token of a live view
HANG_SECONDS = 2.0  # without an answer from Redis for this long, the tokens that were read last count
LONGEST_TOKEN = 512


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request."""

    name: str
    scope: Scope
    limits: Limits = NO_LIMITS

    def may(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    @property
    def owner(self) -> str:
        """The owner of the runs that it submits; empty if no token was needed."""
        return "" if self == ANYBODY else self.name

    @property
    def max_priority(self) -> int:
        """The highest priority that it may give a run."""
        return MAX_PRIORITY if self.may("admin") else self.limits.priority

    def audit(self, action: str, run: str = "", **details: object) -> AuditRecord:
        """Return the record of something that it does now."""
        return AuditRecord(time=time.time(), who=self.name, action=action, run=run, details=details)


ANYBODY = Principal("anybody", "admin")
BOOTSTRAP = Principal("bootstrap", "admin")  # holds the token that the server was started with
RESERVED = frozenset({ANYBODY.name, BOOTSTRAP.name, "supervisor", "run-folder"})  # others that the audit names


Owners = dict[str, tuple[str, Principal]]  # digest and owner of each token, by name


class Entry(BaseModel):
    """What Redis holds of a token, without its limits. Fields of other releases are ignored."""

    sha256: str
    scope: Scope
    created: float


class Tokens:
    """The tokens shared by all servers on one Redis.

    Args:
        redis: a client from `services.store.redis.connect`.
        admin_token: the bootstrap token; it is never stored.
        guarded: if False, requests without a token may do everything.
    """

    def __init__(self, redis: Client, admin_token: str | None, *, guarded: bool) -> None:
        self.guarded = guarded
        self._redis = redis
        self._bootstrap = digest(admin_token) if admin_token else None
        self._known = SharedRead(self._read, FRESH_SECONDS)
        self._unreadable: set[str] = set()

    async def principal(self, token: str | None) -> Principal | None:
        """Return the token's owner, or None if nobody has it. Raises `HostError` if the tokens were never read yet."""
        if not self.guarded:
            return ANYBODY
        if not token or len(token) > LONGEST_TOKEN:
            return None
        given = digest(token)
        if self._bootstrap is not None and hmac.compare_digest(given, self._bootstrap):
            return BOOTSTRAP
        found = None
        for stored, principal in (await self._newest()).values():  # all of them, so that timing reveals nothing
            if hmac.compare_digest(given, stored):
                found = principal
        return found

    async def until_revoked(self, token: str | None) -> None:
        """Return within seconds of the moment from which nobody has the token."""
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            with contextlib.suppress(HostError):  # the tokens that were read last count
                if await self.principal(token) is None:
                    return

    async def all(self) -> list[TokenView]:
        """Return all tokens that this release can read, the oldest first."""
        stored = await self._do(self._redis.hgetall(TOKENS_KEY))
        views = [_view(name, entry, stored[name]) for name, entry in self._readable(stored).items()]
        return sorted(views, key=lambda view: view.created)

    async def make(self, name: str, scope: Scope, limits: Limits, by: Principal) -> MadeToken:
        """Create a token. Raises `Problem` 409 if there is one with this name, or the server uses the name itself."""
        if name in RESERVED:
            raise Problem(409, "token-exists", f"{name} stands for something else in the audit: choose another name")
        token, created = f"volley_{secrets.token_urlsafe(32)}", time.time()
        entry = {"sha256": digest(token), "scope": scope, "created": created, "limits": limits.model_dump()}

        def change(before: str | None) -> str:
            if before is not None:
                raise Problem(409, "token-exists", f"there is a token {name}: delete it first, or choose another name")
            return json.dumps(entry)

        await self._change(name, change, by.audit("create token", token=name, scope=scope, **limits.model_dump()))
        return MadeToken(name=name, scope=scope, created=created, token=token, limits=limits)

    async def limit(self, name: str, limits: Limits, by: Principal) -> TokenView:
        """Replace a token's limits. Raises `Problem` 404 if there is none with this name, 422 if it submits no runs."""

        entry: dict[str, Any] = {}

        def change(before: str | None) -> str:
            stored = _existing(name, before)
            if name not in self._readable({name: stored}):
                problem = f"another release wrote the token {name}: delete it and create another"
                raise Problem(409, "unreadable-token", problem)
            entry.update(json.loads(stored), limits=limits.model_dump())
            if problem := useless_limits(entry["scope"], limits):
                raise Problem(422, "invalid-request", f"{name}: {problem}")
            return json.dumps(entry)

        await self._change(name, change, by.audit("limit token", token=name, **limits.model_dump()))
        return TokenView(name=name, scope=entry["scope"], created=entry["created"], limits=limits)

    async def delete(self, name: str, by: Principal) -> None:
        """Revoke a token. Raises `Problem` 404 if there is none with this name."""

        def change(before: str | None) -> None:
            _existing(name, before)

        await self._change(name, change, by.audit("delete token", token=name))

    async def _change(self, name: str, change: Callable[[str | None], str | None], audit: AuditRecord) -> None:
        """Replace a token's entry by ``change`` of it, where None is no entry, and record the change."""
        async with self._redis.pipeline() as pipe:
            while True:
                try:
                    await answer(pipe.watch(TOKENS_KEY))
                    entry = change(await answer(pipe.hget(TOKENS_KEY, name)))
                    pipe.multi()
                    if entry is None:
                        pipe.hdel(TOKENS_KEY, name)
                    else:
                        pipe.hset(TOKENS_KEY, name, entry)
                    add_audit(pipe, audit)
                    await answer(pipe.execute())
                except WatchError:
                    continue
                except (RedisError, OSError) as error:
                    raise HostError(f"Redis does not answer: {error}") from error
                self._changed(name, entry)
                return

    def _changed(self, name: str, entry: str | None) -> None:
        """Take up a change at once: what was revoked must not work even if Redis is away from here on."""
        self._known.expire()
        if self._known.value is not None:
            self._known.value.pop(name, None)
            self._known.value.update(self._owners({} if entry is None else {name: entry}))

    async def any(self) -> bool:
        """Return whether there is any valid token."""
        return self._bootstrap is not None or bool(await self._do(self._redis.hlen(TOKENS_KEY)))

    async def _newest(self) -> Owners:
        """Return the owners as Redis has them; known tokens keep working while it is away or hangs."""
        known = self._known.value
        try:
            async with asyncio.timeout(HANG_SECONDS if known else None):
                return await self._known.get()
        except (HostError, TimeoutError):
            if not known:
                raise
            return known

    async def _read(self) -> Owners:
        return self._owners(await self._do(self._redis.hgetall(TOKENS_KEY)))

    def _owners(self, stored: Mapping[str, str]) -> Owners:
        entries = self._readable(stored)
        return {
            name: (each.sha256, Principal(name, each.scope, limits_of(stored[name]))) for name, each in entries.items()
        }

    def _readable(self, stored: Mapping[str, str]) -> dict[str, Entry]:
        """Return the entries of all tokens but those that this release cannot read, which it does not accept."""
        unreadable: dict[str, ValueError] = {}
        found = readable({name: partial(Entry.model_validate_json, text) for name, text in stored.items()}, unreadable)
        for name in unreadable.keys() - self._unreadable:
            log.error("the token %s is not accepted: another release wrote it, and this one cannot read it", name)
        self._unreadable |= unreadable.keys()
        return found

    async def _do(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error


def digest(token: str) -> str:
    """Return the SHA-256 of ``token`` in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer(header: bytes | None) -> str | None:
    """Return the token in an ``Authorization`` header, or None."""
    scheme, _, token = (header or b"").partition(b" ")
    return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else None


class RequiredScope(HTTPBearer):
    """A dependency of routes that need a scope; `services.api.gate.Gate` has already found the request's sender."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scheme_name="token", auto_error=False, description="scopes: read, operate, admin")
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        principal: Principal = request.state.principal
        if not principal.may(self.scope):
            raise Problem(403, "scope-too-small", f"this needs scope {self.scope}, the token has {principal.scope}")


READ, OPERATE, ADMIN = (Depends(RequiredScope(scope)) for scope in SCOPES)


def token_of(request: Request) -> str | None:
    """Return the token that a request was sent with."""
    return bearer(request.headers.get("authorization", "").encode("latin-1"))


def sender_of(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


Sender = Annotated[Principal, Depends(sender_of)]
SentToken = Annotated[str | None, Depends(token_of)]


def _existing(name: str, entry: str | None) -> str:
    """Return a token's entry. Raises `Problem` 404 if there is none."""
    if entry is None:
        raise Problem(404, "no-such-token", f"there is no token {name}")
    return entry


def _view(name: str, entry: Entry, stored: str) -> TokenView:
    return TokenView(name=name, scope=entry.scope, created=entry.created, limits=limits_of(stored))
