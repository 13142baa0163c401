"""Live views: one reader per run, however many clients watch it.

    Redis ── one blocking read ──> Feed ── the same bytes ──> Subscription of each client ──> its connection
    Redis ── missed entries, once at the start, up to the feed's position when the client joined ────────^

An event's id is its position in each stream, so a client that reconnects with ``Last-Event-ID`` receives every later
event exactly once, even from another server. A client that cannot keep up is disconnected and can reconnect this way.
"""

import asyncio
import contextlib
import logging
import math
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.api.index import Filter, RunIndex, seen_state
from services.api.problems import Problem
from services.api.samples import entry_order
from services.api.sse import PING, one_line
from services.api.sse import message as event
from services.store.redis import Entry, Store
from volley.errors import HostError
from volley.state import ENDED, Desired, Observed
from volley.views import BEGINNING
from volley.views import LIVE_STREAMS as STREAMS

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # between reads of desired and observed state
GATHER_SECONDS = 0.2  # entries that arrive within this time are sent in one message
PAGE = 500  # most entries per message
BACKLOG = 256  # messages that a client may be behind
AWAY_SECONDS = 1.0
RUNS_SHOWN = 200

PING_SECONDS = 15.0

Positions = dict[str, str]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a feed: the bytes to send and, for new entries, the feed's positions after them."""

    data: bytes
    positions: Positions = field(default_factory=dict)
    stream: str | None = None
    entries: list[Entry] = field(default_factory=list)


class Subscription:
    """The queue of messages for one client. It ends when closed, or when ``BACKLOG`` messages wait."""

    def __init__(self) -> None:
        self._waiting: deque[Message] = deque()
        self._something = asyncio.Event()
        self.closed = False

    def put(self, message: Message) -> None:
        if len(self._waiting) >= BACKLOG:
            self.forget()
            self.close()
        elif not self.closed:
            self._waiting.append(message)
            self._something.set()

    def forget(self) -> None:
        """Drop the waiting messages."""
        self._waiting.clear()

    def close(self) -> None:
        """Accept no more messages; waiting ones are still delivered."""
        self.closed = True
        self._something.set()

    async def get(self) -> Message | None:
        """Return the next message, a ping after ``PING_SECONDS`` without one, or None at the end."""
        while not self._waiting:
            if self.closed:
                return None
            self._something.clear()
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._something.wait()
            except TimeoutError:
                return Message(PING)
        return self._waiting.popleft()


class Feed:
    """Reads for all its subscribers until the last one leaves or nothing more can come."""

    def __init__(self, read: Callable[["Feed"], Awaitable[None]], name: str) -> None:
        self.subscribers: set[Subscription] = set()
        self.positions: Positions = {}
        self.state: str | None = None  # the last one sent; None until the first read
        self.ended_as: str | None = None  # the state of a run that has ended, once everything it wrote has been sent
        self.first = asyncio.Event()
        self._task = asyncio.create_task(self._run(read), name=name)

    @property
    def ended(self) -> bool:
        return self._task.done()

    def send(self, message: Message) -> None:
        for subscription in self.subscribers:
            subscription.put(message)

    def send_state(self, kind: str, text: str) -> None:
        """Send a state to all subscribers if it has changed."""
        if text != self.state:
            self.state, self.ended_as = text, None
            self.send(Message(event(kind, text)))
        self.first.set()

    def send_ended(self, state: str) -> None:
        """Tell all subscribers, once, that the run has ended and that nothing is left to send."""
        if self.ended_as != state:
            self.ended_as = state
            self.send(Message(ended_event(state)))

    def end(self) -> None:
        self._task.cancel()
        self._close_all()

    def _close_all(self) -> None:
        self.first.set()
        for each in self.subscribers:
            each.close()

    async def _run(self, read: Callable[["Feed"], Awaitable[None]]) -> None:
        try:
            while True:
                try:
                    return await read(self)
                except HostError as error:  # a declared point: views stay open until Redis is back
                    log.warning("live views wait for Redis: %s", error)
                    await asyncio.sleep(AWAY_SECONDS)
        finally:
            self._close_all()


class Live:
    """All feeds of one server.

    Args:
        most: most clients at once.
    """

    def __init__(self, store: Store, index: RunIndex, most: int) -> None:
        self._store, self._index, self._most = store, index, most
        self._feeds: dict[str, Feed] = {}
        self.clients = 0
        self._closed = False

    def run(self, run_id: str, last_event_id: str | None = None) -> AsyncGenerator[bytes, None]:
        """Stream messages about one run, after ``last_event_id`` or from now on.

        Raises:
            Problem: 422 for an invalid id, 503 if too many views are open.
        """
        start = None if last_event_id is None else positions_of(last_event_id)
        self._check_capacity()
        return self._run(run_id, start)

    def runs(self) -> AsyncGenerator[bytes, None]:
        """Stream the newest runs whenever one of them changes. Raises `Problem` 503 if too many views are open."""
        self._check_capacity()
        return self._runs()

    def close(self) -> None:
        """End all live views and accept no more."""
        self._closed = True
        for feed in tuple(self._feeds.values()):
            feed.end()

    async def _run(self, run_id: str, start: Positions | None) -> AsyncGenerator[bytes, None]:
        async with self._join(run_id, lambda feed: self._read_run(feed, run_id)) as (feed, own):
            async for ping in _until_first(feed):
                yield ping
            if feed.state is None:
                return
            own.forget()
            until, ended_as = dict(feed.positions), feed.ended_as  # what is later is in the subscription
            seen = dict(until if start is None else start)
            yield event("observed", feed.state, position_text(seen))
            async for data in self._missed(run_id, seen, until):
                yield data
            if ended_as is not None:
                yield ended_event(ended_as)
            while (message := await own.get()) is not None:
                if (new := only_new(message, seen)) is not None:
                    yield new

    async def _runs(self) -> AsyncGenerator[bytes, None]:
        async with self._join("", self._read_runs) as (feed, own):
            async for ping in _until_first(feed):
                yield ping
            if feed.state is None:
                return
            own.forget()
            yield event("runs", feed.state)
            while (message := await own.get()) is not None:
                yield message.data

    def _check_capacity(self) -> None:
        if self._closed or self.clients >= self._most:
            raise Problem(503, "too-many-live-views", "try again later", headers={"Retry-After": "5"})

    @contextlib.asynccontextmanager
    async def _join(
        self, name: str, read: Callable[[Feed], Awaitable[None]]
    ) -> AsyncIterator[tuple[Feed, Subscription]]:
        feed = self._feeds.get(name)
        if feed is None or feed.ended:
            feed = self._feeds[name] = Feed(read, f"live {name or 'runs'}")
        own = Subscription()
        feed.subscribers.add(own)
        self.clients += 1
        try:
            yield feed, own
        finally:
            self.clients -= 1
            feed.subscribers.discard(own)
            if not feed.subscribers:
                feed.end()
                if self._feeds.get(name) is feed:
                    del self._feeds[name]

    async def _read_run(self, feed: Feed, run_id: str) -> None:
        for stream in STREAMS:
            if stream not in feed.positions:
                newest = await self._store.newest(run_id, stream, 1)
                feed.positions[stream] = newest[-1][0] if newest else BEGINNING
        loop = asyncio.get_running_loop()
        polled, state = -math.inf, ""
        while True:
            if loop.time() - polled >= POLL_SECONDS:
                polled = loop.time()
                found = await self._store.read_runs([run_id])
                if not found:
                    feed.send(Message(event("deleted", "{}")))
                    return
                state = found[0][2].state
                feed.send_state("observed", state_text(*found[0][1:]))
            new = await self._store.follow(run_id, feed.positions, seconds=POLL_SECONDS, count=PAGE)
            for stream, entries in new.items():
                feed.positions[stream] = entries[-1][0]
                feed.send(
                    Message(entries_event(stream, entries, feed.positions), feed.positions.copy(), stream, entries)
                )
            if not new and state in ENDED:  # a driver writes in order, its last state last
                feed.send_ended(state)
            await asyncio.sleep(GATHER_SECONDS)

    async def _read_runs(self, feed: Feed) -> None:
        while True:
            page = await self._index.page(Filter(), limit=RUNS_SHOWN)
            feed.send_state("runs", page.model_dump_json(include={"items"}))
            await asyncio.sleep(POLL_SECONDS)

    async def _missed(self, run_id: str, seen: Positions, until: Positions) -> AsyncIterator[bytes]:
        """Yield the entries after ``seen`` up to and including ``until``, and advance ``seen``."""
        for stream in STREAMS:
            while entry_order(seen[stream]) < entry_order(until[stream]):
                page = await self._store.entries(run_id, stream, after=seen[stream], count=PAGE)
                new = [entry for entry in page if entry_order(entry[0]) <= entry_order(until[stream])]
                if not new:
                    break
                seen[stream] = new[-1][0]
                yield entries_event(stream, new, seen)


def only_new(message: Message, seen: Positions) -> bytes | None:
    """Return the part of a feed's message that its client has not ``seen``, and advance ``seen``.

    A client may be ahead of the feed if it comes from another server.
    """
    if message.stream is None:
        return message.data
    last = entry_order(seen[message.stream])
    new = [entry for entry in message.entries if entry_order(entry[0]) > last]
    if not new:
        return None
    seen[message.stream] = new[-1][0]
    if len(new) == len(message.entries) and seen == message.positions:
        return message.data
    return entries_event(message.stream, new, seen)


async def _until_first(feed: Feed) -> AsyncIterator[bytes]:
    """Yield pings until the feed's first read, which waits while Redis is away."""
    while not feed.first.is_set():
        try:
            async with asyncio.timeout(PING_SECONDS):
                await feed.first.wait()
        except TimeoutError:
            yield PING


def entries_event(stream: str, entries: list[Entry], positions: Positions) -> bytes:
    """Format one message with new entries."""
    if stream == "metrics":
        body: dict[str, Any] = {"rows": [row for _, row in entries]}
    else:
        body = {"items": [{**row, "id": name} for name, row in entries]}
    return event(stream, one_line(body), position_text(positions))


def ended_event(state: str) -> bytes:
    return event("ended", f'{{"state":"{state}"}}')


def state_text(desired: Desired, observed: Observed) -> str:
    states = f'"desired":{desired.model_dump_json()},"observed":{observed.model_dump_json()}'
    return f'{{{states},"state":"{seen_state(observed)}"}}'


def position_text(positions: Mapping[str, str]) -> str:
    """Encode positions as an event id."""
    return ".".join(positions[stream] for stream in STREAMS)


def positions_of(event_id: str) -> Positions:
    """Decode an event id. Raises `Problem` 422 for an invalid one."""
    if not re.fullmatch(r"\d{1,15}-\d{1,9}(\.\d{1,15}-\d{1,9}){2}", event_id, re.ASCII):
        raise Problem(422, "invalid-request", "header/Last-Event-ID: send the id of an event of this run unchanged")
    return dict(zip(STREAMS, event_id.split("."), strict=True))
