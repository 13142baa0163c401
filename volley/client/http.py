"""Sends requests with httpx, blocking or not, and turns failures into errors that say what to do."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, TypedDict

import httpx
import numpy as np

from volley.client.operations import Awaiting, Blocking, Operation, Request, T, Watch
from volley.client.server import find_server
from volley.errors import (
    ApiError,
    Conflict,
    HostError,
    InvalidRequest,
    JobError,
    NotAllowed,
    NotFound,
    ServerAway,
    ServerBusy,
)

CALL_SECONDS = 30.0
SILENCE_SECONDS = 45.0  # of a live stream, which carries a ping every 15 s
RETRY_SECONDS = 1.0  # before a broken live stream is opened again

ERRORS: dict[int, type[ApiError]] = {
    400: InvalidRequest,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    412: Conflict,
    413: InvalidRequest,
    422: InvalidRequest,
    429: ServerBusy,
    503: ServerBusy,
}


class BlockingHttp(Blocking):
    """Runs operations to their end, with a connection pool of its own; use as a context manager.

    Args:
        timeout: seconds that an answer may take.
        transport: replaces the network, for tests.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        timeout: float = CALL_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.server, headers = _server(server, token)
        self._timeout = timeout
        self._http = httpx.Client(base_url=self.server, headers=headers, transport=transport)

    def close(self) -> None:
        self._http.close()

    def _run(self, steps: Operation[T]) -> T:
        try:
            request = next(steps)
            while True:
                time.sleep(request.delay)
                try:
                    answer = self._send(request)
                except (ServerAway, ApiError) as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _send(self, request: Request) -> httpx.Response:
        try:
            return checked(self._http.request(**_arguments(request, self._timeout)))
        except httpx.HTTPError as error:
            raise away(self.server, error) from error

    def _watch(self, watch: Watch[T]) -> Iterator[T]:
        while True:
            try:
                with self._http.stream(**_stream_arguments(watch.request())) as answer:
                    if answer.is_error:
                        answer.read()
                    for line in events_of(answer).iter_lines():
                        yield from watch.take(line)
                        if watch.ended:
                            return
                watch.lost(ServerAway(f"{self.server} closed the connection"))
            except httpx.HTTPError as error:
                watch.lost(away(self.server, error))
            except ApiError as error:
                watch.lost(error)
            time.sleep(RETRY_SECONDS)


class AwaitingHttp(Awaiting):
    """Awaits operations; use as an asynchronous context manager. The arguments are those of `BlockingHttp`."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        timeout: float = CALL_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.server, headers = _server(server, token)
        self._timeout = timeout
        self._http = httpx.AsyncClient(base_url=self.server, headers=headers, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def _run(self, steps: Operation[T]) -> T:
        try:
            request = next(steps)
            while True:
                await asyncio.sleep(request.delay)
                try:
                    answer = await self._send(request)
                except (ServerAway, ApiError) as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _send(self, request: Request) -> httpx.Response:
        try:
            return checked(await self._http.request(**_arguments(request, self._timeout)))
        except httpx.HTTPError as error:
            raise away(self.server, error) from error

    async def _watch(self, watch: Watch[T]) -> AsyncIterator[T]:
        while True:
            try:
                async with self._http.stream(**_stream_arguments(watch.request())) as answer:
                    if answer.is_error:
                        await answer.aread()
                    async for line in events_of(answer).aiter_lines():
                        for item in watch.take(line):
                            yield item
                        if watch.ended:
                            return
                watch.lost(ServerAway(f"{self.server} closed the connection"))
            except httpx.HTTPError as error:
                watch.lost(away(self.server, error))
            except ApiError as error:
                watch.lost(error)
            await asyncio.sleep(RETRY_SECONDS)


class _Arguments(TypedDict):
    """Arguments of `httpx.Client.request`."""

    method: str
    url: str
    params: Mapping[str, Any]
    content: bytes | None
    headers: Mapping[str, str]
    timeout: httpx.Timeout


def _arguments(request: Request, timeout: float) -> _Arguments:
    content, headers = None, dict(request.headers)
    if request.json is not None:
        headers["Content-Type"] = "application/json"
        try:
            content = json.dumps(request.json, default=plain, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise JobError(f"the request has a value that is not JSON: {error}") from error
    return {
        "method": request.method,
        "url": request.path,
        "params": {name: value for name, value in request.params.items() if value not in (None, [])},
        "content": content,
        "headers": headers,
        "timeout": httpx.Timeout(request.timeout or timeout),
    }


def plain(value: object) -> object:
    """Return the JSON form of a NumPy scalar or array. Raises `TypeError` for anything else."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.60}")


def _stream_arguments(request: Request) -> _Arguments:
    return {**_arguments(request, CALL_SECONDS), "timeout": httpx.Timeout(CALL_SECONDS, read=SILENCE_SECONDS)}


def _server(server: str | None, token: str | None) -> tuple[str, dict[str, str]]:
    """Return the URL of the server and the headers of every request to it."""
    found, token = find_server(server, token)
    try:
        valid = httpx.URL(found).scheme in ("http", "https")
    except httpx.InvalidURL:
        valid = False
    if not valid:
        raise JobError(f"{found!r} is not the URL of a server: write http://HOST:PORT or https://HOST")
    return found, {"Authorization": f"Bearer {token}"} if token else {}


def away(server: str, error: httpx.HTTPError) -> ServerAway:
    return ServerAway(
        f"{server} does not answer: {error or type(error).__name__}. Is it up? `volley up` starts one on this machine"
    )


def events_of(answer: httpx.Response) -> httpx.Response:
    """Return the answer. Raises `ApiError` if it is an error, `HostError` if it is no live stream."""
    kind = checked(answer).headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise strange(answer, f"content type {kind!r}")
    return answer


def checked(answer: httpx.Response) -> httpx.Response:
    """Return the answer. Raises the `ApiError` for its problem document (RFC 9457) if it is an error."""
    if not answer.is_error:
        return answer
    try:
        problem = dict(answer.json())
    except (ValueError, TypeError):
        problem = {}
    text = str(problem.get("detail") or problem.get("title") or f"HTTP {answer.status_code} {answer.reason_phrase}")
    fields = {str(each["pointer"]): str(each["detail"]) for each in problem.get("errors") or ()}
    if answer.status_code in (401, 403) and "token" not in text:
        text += ": set VOLLEY_TOKEN to a token with this scope"
    lines = [f"  {pointer}: {detail}" for pointer, detail in fields.items() if detail not in text]
    after = answer.headers.get("retry-after", "")
    raise ERRORS.get(answer.status_code, ApiError)(
        "\n".join([text, *lines]),
        answer.status_code,
        str(problem.get("type", "")).removeprefix("urn:volley:problem:"),
        fields,
        float(after) if after.isdecimal() else None,
    )


def strange(answer: httpx.Response, what: object) -> HostError:
    """Return the error for an answer that no Volley server of this release gives."""
    return HostError(f"{answer.url.copy_with(query=None)} does not answer like a Volley server of this release: {what}")
