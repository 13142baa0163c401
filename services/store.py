"""Small typed state in Redis, JSON only: run records, metric and event streams, the ledger's counts.

Keys, with ``R`` the run's id:
    volley:runs              set of ids
    volley:run:R             JSON run record
    volley:run:R:metrics     stream, one entry a step: field ``json``
    volley:run:R:events      stream, one entry an event: field ``json``
    volley:run:R:ledger      hash of counts
"""

import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from volley.errors import HostError

RETRIES = 8  # with backoff capped at 5 s: about 20 s of outage is waited out
STREAM_LENGTH = 200_000  # entries kept of each stream


class RunStore:
    """One run's state. Every write is retried while Redis is away, then raises `HostError`."""

    def __init__(self, url: str, run_id: str) -> None:
        self.run_id = run_id
        self._key = f"volley:run:{run_id}"
        self._redis: Any = redis.asyncio.from_url(
            url,
            decode_responses=True,
            socket_timeout=10,
            socket_connect_timeout=5,
            retry=Retry(ExponentialBackoff(cap=5, base=0.1), RETRIES),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._redis.aclose()

    async def put_record(self, record: Mapping[str, Any]) -> None:
        """Replace the run's record."""
        pipe = self._redis.pipeline()
        pipe.sadd("volley:runs", self.run_id)
        pipe.set(self._key, json.dumps(record))
        await self._execute(pipe)

    async def record(self) -> dict[str, Any] | None:
        """The run's record, or None."""
        text = await self._redis.get(self._key)
        return None if text is None else dict(json.loads(text))

    async def add_step(self, metrics: Mapping[str, Any], ledger: Mapping[str, int]) -> None:
        """Append one step's metrics and replace the ledger's counts, in one round trip."""
        pipe = self._redis.pipeline()
        pipe.xadd(f"{self._key}:metrics", {"json": json.dumps(metrics)}, maxlen=STREAM_LENGTH, approximate=True)
        if ledger:
            pipe.hset(f"{self._key}:ledger", mapping=dict(ledger))
        await self._execute(pipe)

    async def add_event(self, kind: str, **details: Any) -> None:
        """Append an event: what happened, to whom, when."""
        entry = {"kind": kind, "time": time.time(), **details}
        pipe = self._redis.pipeline()
        pipe.xadd(f"{self._key}:events", {"json": json.dumps(entry)}, maxlen=STREAM_LENGTH, approximate=True)
        await self._execute(pipe)

    async def metrics(self) -> list[dict[str, Any]]:
        """Every step's metrics, oldest first."""
        return [json.loads(entry["json"]) for _, entry in await self._redis.xrange(f"{self._key}:metrics")]

    async def events(self) -> list[dict[str, Any]]:
        """Every event, oldest first."""
        return [json.loads(entry["json"]) for _, entry in await self._redis.xrange(f"{self._key}:events")]

    async def ledger(self) -> dict[str, int]:
        """The ledger's counts."""
        return {key: int(value) for key, value in (await self._redis.hgetall(f"{self._key}:ledger")).items()}

    async def _execute(self, pipe: Any) -> None:
        try:
            await pipe.execute()
        except (RedisError, OSError) as error:
            raise HostError(f"Redis stayed away through {RETRIES} tries: {error}") from error
