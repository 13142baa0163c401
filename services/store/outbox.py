"""A driver's writes to Redis: in order, each exactly once, without making the run wait.

    put ─> queue ─> one task: MULTI … SET flushed N EXEC ─> Redis
                      ^ no answer? wait, read `flushed`, send the writes after it

The run folder has everything too; Redis is how others see the run. So the run continues while Redis is away, and its
writes queue up. Each transaction also sets ``flushed`` to the number of its last write, which tells after a lost
answer whether the transaction was applied.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from redis.exceptions import RedisError

from services.store.redis import STREAMS, answer, close, connect, run_key
from services.tasks import cancel_all
from volley.errors import HostError
from volley.state import Observed

log = logging.getLogger(__name__)

BATCH = 200  # writes per transaction
MOST = 50_000  # most queued writes; older ones are dropped, and remain only in the run folder
RETRY_SECONDS = 0.5
CLOSE_SECONDS = 30.0  # an embedded Redis that hangs is restarted within this time

Command = tuple[Any, ...]


class Outbox:
    """The writes of one run's driver. Use as an async context manager: it connects on entry and flushes on exit.

    Attributes:
        away_since: when Redis stopped answering, seconds since 1970; None while it answers.
        lost: number of dropped writes.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self.run_id = run_id
        self.away_since: float | None = None
        self.lost = 0
        self._redis = connect(url, retries=0)
        self._queue: deque[tuple[int, tuple[Command, ...]]] = deque()
        self._number = 0
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Raises `HostError` if Redis does not answer."""
        try:
            self._number = await self._flushed()
        except (RedisError, OSError) as error:
            await close(self._redis)
            raise HostError(f"Redis does not answer: {error}") from error
        except asyncio.CancelledError:
            await close(self._redis)
            raise
        self._sending = asyncio.create_task(self._send_all(), name="outbox")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._empty.wait()
        except TimeoutError:
            log.error(
                "Redis does not answer: %d writes of run %s are only in the run folder", len(self._queue), self.run_id
            )
        finally:
            try:
                if self._sending is not None:
                    await cancel_all((self._sending,))
                    if not self._sending.cancelled():
                        self._sending.result()  # raises the error that ended it
            finally:
                await close(self._redis)

    def add(self, stream: str, *entries: Mapping[str, Any]) -> None:
        """Append ``entries`` to one of the run's streams."""
        key, most = run_key(self.run_id, stream), STREAMS[stream]
        self._put(*(("XADD", key, "MAXLEN", "~", most, "*", "json", json.dumps(entry)) for entry in entries))

    def step(self, row: Mapping[str, Any], ledger: Mapping[str, int]) -> None:
        """Append a step's metrics and replace the ledger's counts, together."""
        metrics = ("XADD", run_key(self.run_id, "metrics"), "MAXLEN", "~", STREAMS["metrics"], "*", "json")
        counts = [part for item in ledger.items() for part in item]
        ledgers = [("HSET", run_key(self.run_id, "ledger"), *counts)] if counts else []
        self._put((*metrics, json.dumps(row)), *ledgers)

    def observed(self, observed: Observed) -> None:
        """Replace the observed state."""
        self._put(("SET", run_key(self.run_id, "observed"), observed.model_dump_json()))

    def _put(self, *commands: Command) -> None:
        self._number += 1
        self._queue.append((self._number, commands))
        if len(self._queue) > MOST:
            self._queue.popleft()
            self.lost += 1
        self._empty.clear()
        self._wake.set()

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                try:
                    await self._send_some()
                    self.away_since = None
                except (RedisError, OSError) as error:
                    if self.away_since is None:
                        self.away_since = time.time()
                        log.warning("Redis does not answer, writes are queued: %s", error)
                    await self._drop_applied()
            self._empty.set()

    async def _send_some(self) -> None:
        batch = [self._queue[i] for i in range(min(BATCH, len(self._queue)))]
        pipe = self._redis.pipeline(transaction=True)
        for _, commands in batch:
            for command in commands:
                pipe.execute_command(*command)
        last = batch[-1][0]
        pipe.set(run_key(self.run_id, "flushed"), last)
        await answer(pipe.execute())
        self._drop_until(last)

    async def _drop_applied(self) -> None:
        """Wait until Redis answers, and drop queued writes that it applied although its answer was lost."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(RedisError, OSError):  # still away
                self._drop_until(await self._flushed())
                return

    def _drop_until(self, number: int) -> None:
        while self._queue and self._queue[0][0] <= number:
            self._queue.popleft()

    async def _flushed(self) -> int:
        return int(await answer(self._redis.get(run_key(self.run_id, "flushed"))) or 0)
