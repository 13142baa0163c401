"""Sends one notice: only to hosts that the operator allows, and never where a redirect points."""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Collection
from typing import Self

import httpx

from services.notifications.notices import Notice, headers, key_problem
from volley.errors import VolleyError
from volley.hosts import is_public, plain_host
from volley.webhooks import ANY_HOST, allowed_host

ATTEMPT_SECONDS = 10.0


class NotDelivered(VolleyError):
    """A webhook did not accept a notice. The message holds no secret, and nothing of the URL but its host."""


class Sender:
    """Sends notices. Use as an async context manager.

    Args:
        hosts: hosts that may be called. ``*`` stands for all with public addresses; hosts with others, such as
            loopback, link-local and private ones, are called only if they are named.

    Raises:
        ValueError: one of ``hosts`` is no host.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(map(allowed_host, hosts))
        self._client = httpx.AsyncClient(
            timeout=ATTEMPT_SECONDS, follow_redirects=False, trust_env=False, verify=ssl.create_default_context()
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def send(self, notice: Notice) -> None:
        """Send a notice; its body is the request's. The answer's body is not read.

        Raises:
            NotDelivered: the host is not allowed or does not answer, the answer is not 2xx, or there is no key.
        """
        secret = _secret(notice)
        try:
            url = httpx.URL(notice.url)
            async with asyncio.timeout(ATTEMPT_SECONDS):
                address = await self._address(url)
                request = self._client.build_request(
                    "POST",
                    url.copy_with(host=address),
                    content=notice.body,
                    headers={**headers(notice, secret, time.time()), "Host": url.netloc.decode()},
                    extensions={"sni_hostname": url.host},
                )
                answer = await self._client.send(request, stream=True)
                await answer.aclose()
        except httpx.InvalidURL as error:
            raise NotDelivered(f"the webhook's URL cannot be called: {error}") from error
        except TimeoutError:
            raise NotDelivered(f"{url.host} did not answer within {ATTEMPT_SECONDS:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise NotDelivered(f"{url.host}: {str(error) or type(error).__name__}") from error
        if not answer.is_success:
            raise NotDelivered(f"{url.host} answered {answer.status_code}")

    async def _address(self, url: httpx.URL) -> str:
        """The host or address to connect to: a checked address, so that a name cannot resolve to another one later."""
        try:
            host = plain_host(url.host)
        except ValueError as error:
            raise NotDelivered(str(error)) from error
        if host in self._hosts:
            return host
        if ANY_HOST not in self._hosts:
            raise NotDelivered(f"{host} is not among the hosts that webhooks may call: volley up --webhook-host")
        found = await asyncio.get_running_loop().getaddrinfo(host, url.port or 443, type=socket.SOCK_STREAM)
        addresses = [str(place[0]) for *_, place in found]
        if private := [address for address in addresses if not is_public(address)]:
            raise NotDelivered(f"{host} has the private address {private[0]}: * allows only public ones; name it")
        return addresses[0]


def _secret(notice: Notice) -> str | None:
    """The signing key; None if the webhook has none."""
    if notice.secret_env is None:
        return None
    secret = os.environ.get(notice.secret_env)
    if problem := key_problem(secret, notice.secret_env):
        raise NotDelivered(problem)
    return secret
