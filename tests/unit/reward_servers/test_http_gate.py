"""Host names and origins, as browsers and those who imitate them send them."""

from collections.abc import Collection

import pytest
from starlette.types import Message, Receive, Scope, Send

from reward_servers.http_gate import (
    LOOPBACK_HOSTS,
    BrowserGate,
    accepted_hosts,
    declares_json,
    from_another_site,
    host_name,
    is_loopback,
)
from volley.errors import HostError


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b"localhost", "localhost"),
        (b"LocalHost:8091", "localhost"),
        (b"127.0.0.1:1", "127.0.0.1"),
        (b"[::1]", "::1"),
        (b"[::1]:80", "::1"),
        (b"reward.example.", "reward.example."),
        (b"[::1].evil.com", ""),
        (b"[::1]evil", ""),
        (b"[::1]:80.evil.com", ""),
        (b"[::1", ""),
        (b"localhost:80.evil.com", ""),
        (b"localhost:80:80", ""),
        (b"localhost:8a", ""),
        (b"", ""),
        (b"[]", ""),
        (b"\xff", "\xff"),
    ],
)
def test_host_names(header: bytes, name: str) -> None:
    assert host_name(header) == name
    assert (name in LOOPBACK_HOSTS) == (
        header.lower() in {b"localhost", b"localhost:8091", b"127.0.0.1:1", b"[::1]", b"[::1]:80"}
    )


def test_other_sites() -> None:
    host = {b"host": b"localhost:80"}
    assert not from_another_site(host)
    assert not from_another_site(host | {b"origin": b"http://localhost:80", b"sec-fetch-site": b"same-origin"})
    for origin in (
        b"null",
        b"",
        b"http://localhost",
        b"http://evil.example",
        b"localhost:80",
        b"http://localhost:80.evil",
    ):
        assert from_another_site(host | {b"origin": origin}), origin
    for site in (b"cross-site", b"same-site", b""):
        assert from_another_site(host | {b"sec-fetch-site": site}), site


def test_content_types() -> None:
    assert declares_json({b"content-type": b"Application/JSON; charset=utf-8"})
    for kind in (b"", b"text/plain", b"application/json-x", b"multipart/form-data; x=application/json"):
        assert not declares_json({b"content-type": kind})


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.com", "")))


async def asked(hosts: Collection[str] | None, host: bytes) -> int:
    """The status of a request by a page of ``host`` itself, which is what DNS rebinding makes it."""
    statuses: list[int] = []

    async def reached(_scope: Scope, _receive: Receive, _send: Send) -> None:
        statuses.append(200)

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def answered(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    headers = [(b"host", host), (b"origin", b"http://" + host), (b"sec-fetch-site", b"same-origin")]
    json = (b"content-type", b"application/json")
    scope = {"type": "http", "path": "/v1/score", "method": "POST", "headers": [*headers, json]}
    await BrowserGate(reached, hosts)(scope, nothing, answered)
    return statuses[0]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
async def test_a_page_under_a_rebound_name_does_not_reach_a_server_that_knows_its_names(address: str) -> None:
    hosts = accepted_hosts(address, ("Rewards.example", "[fd00::7]"))
    assert await asked(hosts, b"evil.example:8091") == 421
    for known in (address.encode(), b"rewards.example:8091", b"[fd00::7]:8091", b"localhost:8091"):
        assert await asked(hosts, known) == 200


def test_only_off_loopback_may_the_names_of_a_server_be_unknown() -> None:
    assert accepted_hosts("127.0.0.1", ()) == LOOPBACK_HOSTS
    assert accepted_hosts("127.0.0.2", ()) == LOOPBACK_HOSTS | {"127.0.0.2"}
    assert accepted_hosts("0.0.0.0", ()) is None


@pytest.mark.parametrize("name", ["http://rewards.example", "rewards.example:8091", "", "rewards.example/"])
def test_a_known_name_has_no_scheme_or_port(name: str) -> None:
    with pytest.raises(HostError, match="write a host name or an IP address, without scheme and port"):
        accepted_hosts("10.0.0.7", (name,))
