"""Hosts of URLs that others choose: one spelling for each, and which addresses belong to everybody's internet."""

import ipaddress
import re
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")  # as the last part of a host, it makes an IPv4 address of it
_LOOPBACK_NAME = re.compile(r"(.+\.)?localhost(\.localdomain)?|ip6-(localhost|loopback)")
# Networks that Python counts as global, although they lead to the sender's own network: IPv4 addresses written in IPv6
# that a gateway translates back, site-local addresses, and the metadata server of Azure.
_INTERNAL = tuple(
    map(ipaddress.ip_network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "fec0::/10", "168.63.129.16/32"))
)


def plain_host(host: str) -> str:
    """Return a host name or address in lower case, IPv6 without brackets.

    Raises:
        ValueError: it is spelled in a way that others read differently or not at all, such as ``2130706433`` for
            127.0.0.1; says what to write.
    """
    host = host.lower()
    if ":" in host:
        return _plain_ipv6(host.removeprefix("[").removesuffix("]"))
    if host.endswith("."):
        raise ValueError(f"{host}: write the host without the dot at its end")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        return _plain_ipv4(host)
    if not _NAME.fullmatch(host):
        raise ValueError(f"{host!r:.80} is no host: write a name such as hooks.example.org, or an IP address")
    return host


def is_public(address: str | Address) -> bool:
    """Whether an address is on the internet: not loopback, private, link-local, multicast, or of a cloud's metadata.

    Raises:
        ValueError: it is no address.
    """
    found = ipaddress.ip_address(address)
    inside = any(found in network for network in _INTERNAL if network.version == found.version)
    return found.is_global and not (inside or found.is_multicast or found.is_reserved or found.is_link_local)


def is_inside(host: str) -> bool:
    """Whether a host from `plain_host` can only be inside: an address that is not public, or a name of loopback."""
    try:
        return not is_public(host)
    except ValueError:
        return _LOOPBACK_NAME.fullmatch(host) is not None


def _plain_ipv4(host: str) -> str:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        pass
    try:
        meant = socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        raise ValueError(f"{host!r:.80} is no host: write an IPv4 address as in 192.0.2.1") from None
    raise ValueError(f"{host!r:.80} is an address in an unusual form: write {meant}")


def _plain_ipv6(host: str) -> str:
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError(f"{host!r:.80} is no host: write an IPv6 address as in [2001:db8::1]") from None
    if address.scope_id is not None:
        raise ValueError(f"[{host}]: an address with a zone is reached from one machine only: write another one")
    if (mapped := address.ipv4_mapped) is not None:
        raise ValueError(f"[{host}] is an IPv4 address in an unusual form: write {mapped}")
    if str(address) != host:
        raise ValueError(f"[{host}] is an address in an unusual form: write [{address}]")
    return host
