"""Typed clients of the reward server, sync and async: one call per batch of groups, retried until a deadline.

with RewardClient("http://127.0.0.1:8091") as rewards:
    answer = rewards.score([Item(id="p1", scorer=MathItem(kind="math", answer="4"), responses=["\\\\boxed{4}"])])
    answer.items[0].verdicts[0].reward
"""

import asyncio
import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx

from reward_servers.http_schema import (
    ArcItem,
    CodeItem,
    CountdownItem,
    ExactItem,
    Item,
    Limits,
    MathItem,
    ScoreAnswer,
    ScoreRequest,
)
from volley.errors import DeadlineExceeded, VolleyError

__all__ = [
    "ArcItem",
    "AsyncRewardClient",
    "CodeItem",
    "CountdownItem",
    "ExactItem",
    "Item",
    "Limits",
    "MathItem",
    "RequestRefused",
    "RewardClient",
]

RETRIED = frozenset({408, 429, 502, 503, 504})
LONGEST_PAUSE_S = 10.0


class RequestRefused(VolleyError):
    """The server rejected the request; retrying would not help.

    Args:
        status: HTTP status.
        problem: the body of the response.
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(f"the reward server answered {status}: {problem}")
        self.status, self.problem = status, problem

    def __reduce__(self) -> tuple[type["RequestRefused"], tuple[int, str]]:
        return (RequestRefused, (self.status, self.problem))


class _Base:
    """Common part of both clients.

    Args:
        url: the server's address, without a path.
        token: bearer token, if the server requires one.
        timeout_s: timeout of one call of ``score``, including retries.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/") + "/v1/score"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._timeout_s = timeout_s

    def _too_late(self, why: str) -> DeadlineExceeded:
        return DeadlineExceeded("reward client", f"{self._url} (last error: {why})", self._timeout_s)


class RewardClient(_Base):
    """Blocking client; use as a context manager or call ``close``."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s=timeout_s)
        self._http = httpx.Client(headers=self._headers, transport=transport)

    def score(self, items: Sequence[Item]) -> ScoreAnswer:
        """Score a batch of groups; verdicts are in the order of the request.

        Raises:
            RequestRefused: the request is malformed, too large or unauthorised.
            DeadlineExceeded: no successful response within ``timeout_s``.
        """
        body, deadline, why = _encode(items), time.monotonic() + self._timeout_s, "none"
        for attempt in range(1 << 30):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                response = self._http.post(self._url, content=body, timeout=left)
            except httpx.TransportError as error:
                pause, why = _pause(attempt, None), str(error) or type(error).__name__
            else:
                if response.status_code not in RETRIED:
                    return _decode(response)
                pause, why = _pause(attempt, response), f"{response.status_code} {response.text[:200]}"
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        raise self._too_late(why)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class AsyncRewardClient(_Base):
    """Asyncio client; use as an async context manager or await ``aclose``."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s=timeout_s)
        self._http = httpx.AsyncClient(headers=self._headers, transport=transport)

    async def score(self, items: Sequence[Item]) -> ScoreAnswer:
        """Score a batch of groups, like ``RewardClient.score``."""
        body, deadline, why = _encode(items), time.monotonic() + self._timeout_s, "none"
        for attempt in range(1 << 30):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                response = await self._http.post(self._url, content=body, timeout=left)
            except httpx.TransportError as error:
                pause, why = _pause(attempt, None), str(error) or type(error).__name__
            else:
                if response.status_code not in RETRIED:
                    return _decode(response)
                pause, why = _pause(attempt, response), f"{response.status_code} {response.text[:200]}"
            await asyncio.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        raise self._too_late(why)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


def _encode(items: Sequence[Item]) -> bytes:
    return ScoreRequest(items=list(items)).model_dump_json().encode()


def _decode(response: httpx.Response) -> ScoreAnswer:
    if response.status_code == 200:
        return ScoreAnswer.model_validate_json(response.content)
    raise RequestRefused(response.status_code, response.text[:300])


def _pause(attempt: int, response: httpx.Response | None) -> float:
    """Return the seconds to wait before a retry: ``Retry-After`` or exponential backoff, with jitter."""
    asked = response.headers.get("retry-after", "") if response is not None else ""
    pause = float(asked) if asked.isdecimal() else 0.1 * 2.0 ** min(attempt, 10)
    return min(pause, LONGEST_PAUSE_S) * (0.75 + 0.5 * random.random())
