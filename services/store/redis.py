"""Small typed state in Redis, as JSON. Keys, with ``R`` a run's id:

volley:runs               sorted set of run ids by creation time
volley:run:R              JSON `RunRecord`
volley:run:R:desired      JSON `Desired`
volley:run:R:observed     JSON `Observed`
volley:run:R:ledger       hash of counts
volley:run:R:watched      what the watch for notifications remembers (see `services.notifications.watch`)
volley:run:R:flushed      number of the driver's last write that arrived (see `services.store.outbox`)
volley:run:R:<stream>     one of `STREAMS`, entries with one field ``json``
volley:notices            hash of notices that wait to be delivered, by id
volley:queue              hash of JSON `Place` by run id: the queue, as the supervisor left it
volley:tokens             hash of tokens by name (see `services.api.auth`), with their `Limits`
volley:audit              stream of JSON `AuditRecord`, the newest 100,000
volley:lease:NAME         owner of a lease, expires
volley:idempotency:K      JSON {"body": digest, "run": R}, expires after a week
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.store.readable import desired_of, limits_of, observed_of, readable, run_of
from volley.errors import HostError, JobError
from volley.state import AuditRecord, Desired, Limits, Observed, Place, RunRecord

ANSWER_SECONDS, CONNECT_SECONDS = 10.0, 5.0  # of one try
RETRIES = 8  # with backoff of at most 5 s, enough for an outage of about 20 s
# Entries kept per stream. A resumed run writes some steps again; the later row of a step replaces the earlier.
STREAMS = {"metrics": 200_000, "events": 200_000, "samples": 20_000, "evaluations": 10_000, "timeline": 500}
IDEMPOTENCY_SECONDS = 7 * 86400
NOTICES = "volley:notices"
QUEUE_KEY, TOKENS_KEY, AUDIT_KEY = "volley:queue", "volley:tokens", "volley:audit"
AUDIT_KEPT = 100_000
EVERY_KEY = ("", ":desired", ":observed", ":ledger", ":flushed", ":watched", *(f":{stream}" for stream in STREAMS))

# Compare and change atomically, because an expired lease may already belong to somebody else.
RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

Client = Any  # redis-py types replies as bytes even when they are decoded, and calls as perhaps not awaitable
Entry = tuple[str, dict[str, Any]]  # a stream entry's id and its object


def run_key(run_id: str, part: str = "") -> str:
    """Return the Redis key of a run's record, or of a ``part`` of the run."""
    return f"volley:run:{run_id}:{part}" if part else f"volley:run:{run_id}"


def connect(url: str, *, retries: int = RETRIES) -> Client:
    """Return a client that retries while Redis is away."""
    return redis.asyncio.from_url(
        url,
        decode_responses=True,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=Retry(ExponentialBackoff(cap=5, base=0.1), retries),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )


async def answer(call: Awaitable[Any]) -> Any:
    """Await a call to Redis; raise a cancellation that the client swallows (because of Python 3.11's ``wait_for``)."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    result = await call
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def close(client: Client) -> None:
    """Close a client. If this task is cancelled meanwhile, closing is finished first: nobody else would do it."""
    closing = asyncio.ensure_future(client.aclose())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await closing
        raise


class Store:
    """The state of all runs. Every call is retried while Redis is away and then raises `HostError`."""

    def __init__(self, url: str, *, retries: int = RETRIES) -> None:
        self._redis = connect(url, retries=retries)
        self._retries = retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await close(self._redis)

    async def ping(self) -> None:
        await self._do(self._redis.ping())

    async def create(
        self,
        record: RunRecord,
        desired: Desired | None = None,
        *,
        key: str | None = None,
        body: str = "",
        audit: AuditRecord | None = None,
    ) -> str:
        """Create a run and return its id, or the id of the run that the same idempotency ``key`` created before.

        Args:
            body: digest of the request.
            audit: what to record if the run is created; its run is filled in.

        Raises:
            JobError: the key was used with another body.
        """
        while True:
            async with self._redis.pipeline() as pipe:
                if key is not None:
                    await self._do(pipe.watch(_entry(key)))
                    if (earlier := await self.run_of_key(key, body)) is not None:
                        return earlier
                    pipe.multi()
                    pipe.set(_entry(key), json.dumps({"body": body, "run": record.id}), ex=IDEMPOTENCY_SECONDS)
                pipe.zadd("volley:runs", {record.id: record.created})
                pipe.set(run_key(record.id), record.model_dump_json())
                pipe.set(run_key(record.id, "desired"), (desired or Desired()).model_dump_json(), nx=True)
                if audit is not None:
                    add_audit(pipe, audit.model_copy(update={"run": record.id}))
                try:
                    await answer(pipe.execute())
                except WatchError:
                    continue  # another request with this key was quicker, or the connection was lost
                except (RedisError, OSError) as error:
                    raise self._away(error) from error
                return record.id

    async def run_of_key(self, key: str, body: str) -> str | None:
        """Return the run that idempotency ``key`` created, or None.

        Raises:
            JobError: the key was used with another body.
        """
        text = await self._do(self._redis.get(_entry(key)))
        if text is None:
            return None
        earlier = json.loads(text)
        _check_body(key, earlier["body"], body)
        return str(earlier["run"]) if await self.record(earlier["run"]) is not None else None

    async def run_ids(self) -> list[str]:
        """Return the ids of all runs, newest first."""
        return list(await self._do(self._redis.zrevrange("volley:runs", 0, -1)))

    async def record(self, run_id: str) -> RunRecord | None:
        text = await self._do(self._redis.get(run_key(run_id)))
        return None if text is None else RunRecord.model_validate_json(text)

    async def desired(self, run_id: str) -> Desired:
        return desired_of(await self._do(self._redis.get(run_key(run_id, "desired"))))

    async def observed(self, run_id: str) -> Observed:
        return observed_of(await self._do(self._redis.get(run_key(run_id, "observed"))))

    async def read_runs(
        self, run_ids: Sequence[str], unreadable: dict[str, ValueError] | None = None
    ) -> list[tuple[RunRecord, Desired, Observed]]:
        """Return record, desired and observed state of each run that exists, in one round trip.

        Args:
            unreadable: gets the runs that this release cannot read, each with the reason.

        Raises:
            ValidationError: there is such a run, and no ``unreadable``.
        """
        keys = [run_key(each, part) for each in run_ids for part in ("", "desired", "observed")]
        texts = await self._do(self._redis.mget(keys)) if keys else []
        rows = zip(run_ids, texts[::3], texts[1::3], texts[2::3], strict=True)
        return list(readable({row[0]: partial(run_of, *row[1:]) for row in rows if row[1]}, unreadable).values())

    async def change_desired(
        self, run_id: str, change: Callable[[Desired], Desired], audit: AuditRecord | None = None
    ) -> Desired:
        """Replace the desired state by ``change`` of it, with a higher revision; concurrent changes are not lost."""
        key = run_key(run_id, "desired")
        async with self._redis.pipeline() as pipe:
            while True:
                try:
                    await answer(pipe.watch(key))
                    current = desired_of(await answer(pipe.get(key)))
                    changed = change(current)
                    changed = changed.model_copy(update={"revision": max(changed.revision, current.revision + 1)})
                    pipe.multi()
                    pipe.set(key, changed.model_dump_json())
                    if audit is not None:
                        add_audit(pipe, audit)
                    await answer(pipe.execute())
                except WatchError:
                    continue
                except (RedisError, OSError) as error:
                    raise self._away(error) from error
                return changed

    async def put_observed(self, run_id: str, observed: Observed) -> None:
        await self._do(self._redis.set(run_key(run_id, "observed"), observed.model_dump_json()))

    async def change_if(self, run_id: str, observed: Observed, change: Callable[[Client], None]) -> bool:
        """Make a change in one transaction if the run exists and its observed state is still ``observed``.

        Args:
            change: queues the commands.

        Returns:
            Whether it was made by the transaction whose answer arrived.
        """
        key, state = run_key(run_id), run_key(run_id, "observed")
        async with self._redis.pipeline() as pipe:
            while True:
                try:
                    await answer(pipe.watch(key, state))
                    if not await answer(pipe.exists(key)) or observed_of(await answer(pipe.get(state))) != observed:
                        return False
                    pipe.multi()
                    change(pipe)
                    await answer(pipe.execute())
                except WatchError:
                    continue
                except (RedisError, OSError) as error:
                    raise self._away(error) from error
                return True

    async def delete(self, run_id: str) -> None:
        """Delete the run from Redis; its folder stays."""
        pipe = self._redis.pipeline()
        _remove(pipe, run_id)
        await self._do(pipe.execute())

    async def delete_if(self, run_id: str, observed: Observed, audit: AuditRecord) -> bool:
        """Delete the run like `delete`, if its observed state is still ``observed``; see `change_if`."""

        def remove(pipe: Client) -> None:
            add_audit(pipe, audit)
            _remove(pipe, run_id)

        return await self.change_if(run_id, observed, remove)

    async def places(self, unreadable: dict[str, ValueError] | None = None) -> dict[str, Place]:
        """Return the places of all runs in the queue, by run id; for ``unreadable`` see `read_runs`."""
        texts = await self._do(self._redis.hgetall(QUEUE_KEY))
        parses = {run_id: partial(Place.model_validate_json, text) for run_id, text in texts.items()}
        return readable(parses, unreadable)

    async def move(self, places: Sequence[Place], gone: Collection[str], preempted: Mapping[str, str]) -> None:
        """Write changed places, remove those of the runs ``gone``, and record preemptions: all of it, or nothing.

        Args:
            preempted: ids of runs, each with the id of the run that preempts it.
        """
        pipe = self._redis.pipeline()
        for place in places:
            pipe.hset(QUEUE_KEY, place.run, place.model_dump_json())
        if gone:
            pipe.hdel(QUEUE_KEY, *gone)
        for run_id, by in preempted.items():
            key, most = run_key(run_id, "events"), STREAMS["events"]
            event = {"kind": "preempted", "time": time.time(), "by": by}
            pipe.xadd(key, {"json": json.dumps(event)}, maxlen=most, approximate=True)
            add_audit(
                pipe,
                AuditRecord(time=time.time(), who="supervisor", action="preempt", run=run_id, details={"by": by}),
            )
        await self._do(pipe.execute())

    async def limits(self) -> dict[str, Limits]:
        """Return the limits of all tokens, by name; see `limits_of`."""
        texts = await self._do(self._redis.hgetall(TOKENS_KEY))
        return {name: limits_of(text) for name, text in texts.items()}

    async def audit(self, count: int, before: str | None = None) -> list[tuple[str, AuditRecord]]:
        """Return up to ``count`` audit records with their ids, the newest first, from before the id ``before``."""
        if before is not None and not before.strip("0-"):
            return []  # Redis rejects an interval that ends before the first possible id
        found = await self._do(self._redis.xrevrange(AUDIT_KEY, max=f"({before}" if before else "+", count=count))
        return [(name, AuditRecord.model_validate_json(fields["json"])) for name, fields in found]

    async def lease(self, name: str, owner: str, seconds: float) -> bool:
        """Take or renew the lease ``name`` for ``seconds``; return False if somebody else has it."""
        key, milliseconds = f"volley:lease:{name}", int(seconds * 1000)
        if await self._do(self._redis.set(key, owner, nx=True, px=milliseconds)):
            return True
        return bool(await self._do(self._redis.eval(RENEW, 1, key, owner, milliseconds)))

    async def release(self, name: str, owner: str) -> None:
        """Release the lease if ``owner`` has it."""
        await self._do(self._redis.eval(RELEASE, 1, f"volley:lease:{name}", owner))

    async def entries(
        self, run_id: str, stream: str, *, after: str | None = None, count: int | None = None
    ) -> list[Entry]:
        """Return the entries of one of `STREAMS` after the id ``after``, oldest first."""
        found = await self._do(
            self._redis.xrange(run_key(run_id, stream), min=f"({after}" if after else "-", count=count)
        )
        return [(name, json.loads(fields["json"])) for name, fields in found]

    async def newest(self, run_id: str, stream: str, count: int) -> list[Entry]:
        """Return the ``count`` newest entries of a stream, oldest first."""
        found = await self._do(self._redis.xrevrange(run_key(run_id, stream), count=count))
        return [(name, json.loads(fields["json"])) for name, fields in reversed(found)]

    async def follow(
        self, run_id: str, after: Mapping[str, str], *, seconds: float, count: int = 1000
    ) -> dict[str, list[Entry]]:
        """Wait up to ``seconds`` for new entries; ``after`` has the last known entry id of each stream."""
        positions = {run_key(run_id, stream): name for stream, name in after.items()}
        found = await self._do(self._redis.xread(positions, count=count, block=max(1, int(seconds * 1000))))
        return {
            key.rpartition(":")[2]: [(name, json.loads(fields["json"])) for name, fields in entries]
            for key, entries in found or ()
        }

    async def ledger(self, run_id: str) -> dict[str, int]:
        """Return the ledger's counts."""
        counts = await self._do(self._redis.hgetall(run_key(run_id, "ledger")))
        return {key: int(value) for key, value in counts.items()}

    async def add_event(self, run_id: str, event: Mapping[str, Any]) -> None:
        """Append to a run's events what another process than its driver has to say."""
        row = json.dumps({"time": time.time(), **event})
        await self._do(
            self._redis.xadd(run_key(run_id, "events"), {"json": row}, maxlen=STREAMS["events"], approximate=True)
        )

    async def watch_state(self, run_id: str) -> str | None:
        """Return what `put_watch_state` stored last."""
        text = await self._do(self._redis.get(run_key(run_id, "watched")))
        return None if text is None else str(text)

    async def put_watch_state(self, run_id: str, state: str, notices: Mapping[str, str]) -> None:
        """Store what the watch remembers of a run together with the ``notices`` that follow from it, by id."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.set(run_key(run_id, "watched"), state)
        if notices:
            pipe.hset(NOTICES, mapping=notices)
        await self._do(pipe.execute())

    async def notices(self) -> dict[str, str]:
        """Return all notices that wait to be delivered, by id."""
        return dict(await self._do(self._redis.hgetall(NOTICES)))

    async def put_notice(self, notice_id: str, notice: str) -> None:
        await self._do(self._redis.hset(NOTICES, notice_id, notice))

    async def delete_notice(self, notice_id: str) -> None:
        await self._do(self._redis.hdel(NOTICES, notice_id))

    async def _do(self, call: Awaitable[Any]) -> Any:
        try:
            return await answer(call)
        except (RedisError, OSError) as error:
            raise self._away(error) from error

    def _away(self, error: Exception) -> HostError:
        return HostError(f"Redis does not answer after {self._retries} retries: {error}")


def add_audit(pipe: Client, record: AuditRecord) -> None:
    """Append a record to the audit, in the transaction that makes the change."""
    pipe.xadd(AUDIT_KEY, {"json": record.model_dump_json()}, maxlen=AUDIT_KEPT, approximate=True)


def _remove(pipe: Client, run_id: str) -> None:
    pipe.zrem("volley:runs", run_id)
    pipe.delete(*(f"volley:run:{run_id}{part}" for part in EVERY_KEY))


def _entry(key: str) -> str:
    """The name of what is stored for an idempotency key."""
    return f"volley:idempotency:{key}"


def _check_body(key: str, earlier: str, body: str) -> None:
    if earlier != body:
        raise JobError(f"idempotency key {key!r} was used for another request: choose a new key")
