"""Keeps web pages in a user's browser from using a server on the user's machine; shared by both HTTP servers.

Any page can make the browser send requests to this machine. The Host header is checked to prevent DNS rebinding, and
a request that changes something is rejected if it comes from a page of another site. Bodies must be declared as JSON,
because browsers send other content types across sites without a preflight request.
"""

import ipaddress
import json
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from volley.errors import HostError
from volley.hosts import plain_host

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
PROBES = frozenset({"/healthz", "/readyz"})  # orchestrators use the address; the responses hold no secrets
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
SAME_SITE = frozenset({b"none", b"same-origin"})


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def accepted_hosts(address: str, known_as: Iterable[str]) -> frozenset[str] | None:
    """Return the host names that requests to a server on ``address`` may give; None, which is any, if nothing says.

    Off loopback, a server is reached by names that only ``known_as`` tells.

    Raises:
        HostError: one of ``known_as`` is not a host name or an IP address.
    """
    names = frozenset(map(_known_name, known_as))
    return LOOPBACK_HOSTS | {address.lower()} | names if names or is_loopback(address) else None


def _known_name(name: str) -> str:
    try:
        return plain_host(name)
    except ValueError:
        problem = f"--known-as {name!r:.80}: write a host name or an IP address, without scheme and port"
        raise HostError(problem) from None


def host_name(host: bytes) -> str:
    """Return the name in a ``Host`` header, without port and brackets; "" if it is malformed."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        return name if bracket and _is_port(rest) else ""
    name, colon, rest = text.partition(":")
    return name if _is_port(colon + rest) else ""


def _is_port(text: str) -> bool:
    return not text or (text[0] == ":" and (not text[1:] or text[1:].isdecimal()))


def from_another_site(headers: dict[bytes, bytes]) -> bool:
    """Return whether the headers show that a page of another site sent the request."""
    origin = headers.get(b"origin")
    foreign = origin is not None and origin.lower().partition(b"://")[2] != headers.get(b"host", b"").lower()
    return foreign or headers.get(b"sec-fetch-site", b"none") not in SAME_SITE


def declares_json(headers: dict[bytes, bytes]) -> bool:
    """Return whether the content type is JSON."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


class BrowserGate:
    """ASGI middleware that applies these checks to the reward server.

    Args:
        hosts: accepted names in the Host header; None accepts any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self.app = app
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, problem = refusal
        body = json.dumps({"error": problem}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        known = self._hosts is None or host_name(headers.get(b"host", b"")) in self._hosts
        if not known and scope["path"] not in PROBES:
            return 421, (
                "the server does not have this host name: use its address, or localhost, "
                "or start it with: volley reward-server --known-as HOST"
            )
        if scope["method"] in SAFE:
            return None
        if from_another_site(headers):
            return 403, "a page of another site sent this request"
        return None if declares_json(headers) else (415, "send JSON, and Content-Type: application/json")
