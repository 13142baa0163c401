"""Host names and origins, as browsers and those who imitate them send them."""

import pytest

from reward_servers.http_gate import LOOPBACK_HOSTS, declares_json, from_another_site, host_name, is_loopback


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
