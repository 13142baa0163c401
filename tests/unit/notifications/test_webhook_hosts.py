"""No spelling of an address inside the server's network is called, unless the operator allowed that very host."""

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.api.jobs import refusals
from services.api.settings import ApiSettings
from services.notifications.notices import Notice
from services.notifications.sending import NotDelivered, Sender
from volley.hosts import Address, is_inside, is_public, plain_host
from volley.webhooks import WebhookSpec

NETWORKS = (
    *("127.0.0.0/8", "0.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10"),
    *("192.0.0.0/29", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32", "100.100.100.200/32"),
    *("::1/128", "::/128", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "fd00:ec2::254/128", "::ffff:0:0/96"),
    *("64:ff9b:1::/48", "::/96"),
)


@st.composite
def inside_addresses(draw: st.DrawFn) -> Address:
    network = ipaddress.ip_network(draw(st.sampled_from(NETWORKS)))
    return network[draw(st.integers(0, network.num_addresses - 1))]


def spellings_of_ipv4(address: ipaddress.IPv4Address) -> list[str]:
    """Every form that some resolver reads as this address, and a URL may contain."""
    number, parts = int(address), [int(part) for part in str(address).split(".")]
    a, b, c, d = parts
    tails = ([number], [a, number & 0xFFFFFF], [a, b, c << 8 | d], parts)
    bases = [".".join(form(part) for part in tail) for tail in tails for form in (str, hex, "0{:o}".format)]
    bases += ["0X" + f"{number:X}", f"00{a:o}.{b}.{c}.{d}", f"{a:#x}.{b}.0{c:o}.{d}"]
    mapped = ipaddress.IPv6Address(0xFFFF << 32 | number)
    nat64 = ipaddress.IPv6Address((0x64FF9B << 96) | number)
    six_to_four = ipaddress.IPv6Address((0x2002 << 112) | number << 80)
    literals = [
        f"[{each}]" for each in (mapped, mapped.exploded, nat64, six_to_four, f"::ffff:{address}", f"::{address}")
    ]
    dotted = [f"{each}." for each in bases]
    encoded = ["".join(f"%{ord(letter):02x}" for letter in str(address)), str(address).replace(".", "%2e")]
    return [*bases, *literals, *dotted, *encoded, f"user@{address}", f"hooks.example@{address}", f"{address}\\.example"]


def spellings(address: Address) -> list[str]:
    if isinstance(address, ipaddress.IPv4Address):
        return spellings_of_ipv4(address)
    return [f"[{each}]" for each in (address, address.exploded, str(address).upper(), f"{address}%25eth0")]


def spec(url: str) -> WebhookSpec | None:
    try:
        return WebhookSpec(url=url)
    except ValidationError:
        return None


def deliveries(urls: Iterable[str], *hosts: str) -> list[str]:
    """Why a notice to each URL is not delivered; fails the test if one is."""

    async def send() -> list[str]:
        found = []
        async with Sender(hosts) as sender:
            for url in urls:
                with pytest.raises(NotDelivered) as refused:
                    await sender.send(
                        Notice(id="msg_1", run="r", type="run.done", url=url, secret_env=None, body="{}", due=0.0)
                    )
                found.append(str(refused.value))
        return found

    return asyncio.run(send())


@pytest.fixture(autouse=True)
def no_connections(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "receiver" in request.fixturenames:
        return

    async def connect(*_: object, **__: object) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr("httpx.AsyncHTTPTransport.handle_async_request", connect)


@settings(deadline=None, max_examples=40)
@given(inside_addresses())
def test_no_spelling_of_an_inside_address_is_accepted_or_called_under_any(address: Address) -> None:
    server = ApiSettings(redis_url="x", webhook_hosts=("*",))
    assert not is_public(address)
    urls = [f"http://{host}/hook" for host in spellings(address)]
    assert len(deliveries(urls, "*")) == len(urls)
    for url in urls:
        found = spec(url)
        if found is not None:
            (problem,) = refusals({"notify": [{"url": url}]}, server)
            assert f"does not name {found.host}" in problem.detail
            assert str(ipaddress.ip_address(found.host)) == found.host, "no advice allows another form"


@given(inside_addresses())
def test_an_unusual_form_is_explained_with_the_usual_one(address: Address) -> None:
    for host in spellings(address):
        if "@" in host or "\\" in host or "%" in host or host.endswith("."):
            with pytest.raises(ValueError, match="write"):
                plain_host(host)
            continue
        try:
            assert plain_host(host) in (str(address), host.strip("[]"))
        except ValueError as error:
            meant = str(error).rpartition("write ")[2].strip("[]")
            assert plain_host(meant) == meant
            assert plain_host(f"[{meant}]" if ":" in meant else meant) == meant


@given(st.ip_addresses())
def test_addresses_are_public_only_if_nothing_they_stand_for_is_inside(address: Address) -> None:
    assume(is_public(address))
    assert address.is_global
    if isinstance(address, ipaddress.IPv6Address):
        low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        prefix = int(address) >> 32
        assert prefix not in (0, 0xFFFF, 0x64FF9B << 64), low
        assert address.sixtofour is None


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "api.localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"]
)
def test_names_of_loopback_are_refused_at_submission(host: str) -> None:
    (problem,) = refusals({"notify": [{"url": f"http://{host}/"}]}, ApiSettings(redis_url="x", webhook_hosts=("*",)))
    assert problem.detail.endswith("; * allows public addresses only")
    assert is_inside(host.lower())


@settings(deadline=None)
@given(st.lists(inside_addresses(), min_size=1, max_size=3), st.booleans(), st.randoms())
def test_a_name_with_an_inside_address_among_others_is_not_called(
    inside: list[Address], also_public: bool, order: Any
) -> None:
    found = [str(address) for address in inside] + ["93.184.215.14"] * also_public
    order.shuffle(found)

    async def resolve(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", (address, 80)) for address in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
        assert "has the private address" in deliveries(["https://rebound.example/hook"], "*")[0]


hosts = st.text("abz019.:[]-_%@\\x/ é", max_size=30)


@given(hosts)
@example("a[::1]")
@example("1][::1")
@example("[::1]x")
def test_what_is_accepted_is_the_host_that_the_http_client_calls(host: str) -> None:
    found = spec(f"http://{host}/hook")
    if found is not None:
        assert httpx.URL(found.url).host == found.host == plain_host(found.host)


@given(st.ip_addresses(v=4))
def test_a_plain_host_is_read_the_same_by_the_system(address: ipaddress.IPv4Address) -> None:
    for host in spellings_of_ipv4(address):
        try:
            plain = plain_host(host)
        except ValueError:
            continue
        if ":" not in plain:
            assert socket.inet_ntoa(socket.inet_aton(plain)) == plain == str(address)


@pytest.mark.parametrize(
    ("host", "meant"),
    [
        ("2130706433", "write 127.0.0.1"),
        ("0x7f.1", "write 127.0.0.1"),
        ("0177.0.0.1", "write 127.0.0.1"),
        ("127.1", "write 127.0.0.1"),
        ("[::ffff:127.0.0.1]", "write 127.0.0.1"),
        ("[0:0:0:0:0:0:0:1]", "write [::1]"),
        ("localhost.", "without the dot"),
        ("a..b", "is no host"),
        ("1.2.3.400", "write an IPv4 address"),
        ("[fe80::1%eth0]", "zone"),
        ("", "is no host"),
    ],
)
def test_operators_too_name_hosts_in_one_form(host: str, meant: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(meant)):
        ApiSettings(redis_url="x", webhook_hosts=(host,))


def test_hosts_in_capitals_and_brackets_are_the_same_host() -> None:
    assert ApiSettings(redis_url="x", webhook_hosts=("Hooks.Example", "[::1]", "*")).webhook_hosts == (
        *("hooks.example", "::1"),
        "*",
    )
    server = ApiSettings(redis_url="x", webhook_hosts=("[::1]",))
    assert list(refusals({"notify": [{"url": "http://[::1]:8080/"}]}, server)) == []


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[str]]]:
    """A server that sends everybody on to a secret path of its own, and the paths that it was asked for."""
    seen: list[str] = []

    class Redirects(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.path)
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/secret")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Redirects)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_allowed_host_is_called_and_its_redirect_is_not_followed(receiver: tuple[str, list[str]]) -> None:
    url, seen = receiver
    assert deliveries([url], "127.0.0.1") == ["127.0.0.1 answered 307"]
    assert seen == ["/hook"]
