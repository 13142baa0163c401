"""Both forms of the client, called in the same way."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from volley.client import AsyncClient, AsyncRun, Client, Run

Handler = Callable[[httpx.Request], httpx.Response]


class Blocking:
    """Calls the blocking form."""

    def __init__(self, server: str | None, transport: httpx.MockTransport | None) -> None:
        self.client = Client(server, transport=transport)

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return method(*args, **options)

    def items(self, method: Callable[..., Iterator[Any]], *args: Any, **options: Any) -> list[Any]:
        return list(method(*args, **options))

    def close(self) -> None:
        self.client.close()


class Awaiting:
    """Calls the asynchronous form in an event loop of its own."""

    def __init__(self, server: str | None, transport: httpx.MockTransport | None) -> None:
        self.runner = asyncio.Runner()
        self.client = AsyncClient(server, transport=transport)

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.runner.run(method(*args, **options))

    def items(self, method: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        async def collect() -> list[Any]:
            return [item async for item in method(*args, **options)]

        return self.runner.run(collect())

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


Form = Blocking | Awaiting
Connect = Callable[..., Form]


def problem(status: int, detail: str, kind: str = "x", **headers: str) -> httpx.Response:
    document = {"type": f"urn:volley:problem:{kind}", "title": kind, "status": status, "detail": detail, "errors": []}
    return httpx.Response(status, json=document, headers=headers)


def type_of(form: Form) -> Any:
    return Run if isinstance(form, Blocking) else AsyncRun
