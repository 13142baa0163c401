"""The live view of a run: server-sent events, read over as many connections as it takes."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal

from volley.client.operations import Item, Request
from volley.errors import ApiError, HostError, NotFound, ServerAway
from volley.views import LIVE_START

AWAY_SECONDS = 120.0  # how long a live view waits for a server that does not answer

UpdateKind = Literal["state", "step", "event", "evaluation"]
KINDS: dict[str, UpdateKind] = {"metrics": "step", "events": "event", "evaluations": "evaluation"}


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """One event of the live view, as docs/api.md lists them."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """Something that happened in a run.

    Attributes:
        kind: ``state``, ``step``, ``event`` or ``evaluation``.
        data: of a state ``desired``, ``observed`` and ``state``; of a step its metrics; else the row.
    """

    kind: UpdateKind
    data: dict[str, Any]


class EventParser:
    """Parses server-sent events; https://html.spec.whatwg.org/multipage/server-sent-events.html

    Attributes:
        last_id: the id of the last event that has one.
    """

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self._id, self._kind, self._data = last_id, "message", list[str]()

    def take(self, line: str) -> Iterator[LiveEvent]:
        """Yield the event that ``line`` completes, if any. Raises `HostError` if its data are not a JSON object."""
        if not line:
            kind, data = self._kind, "\n".join(self._data)
            self._kind, self._data, self.last_id = "message", [], self._id
            if data:
                yield LiveEvent(kind, _json(data))
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._kind = value
        elif field == "id":
            self._id = value

    def cut(self) -> None:
        """Forget an event that a broken connection left incomplete."""
        self._id, self._kind, self._data = self.last_id, "message", []


class LiveView(Generic[Item]):
    """What happens in a run.

    Args:
        choose: what to make of each event.
        since_start: begin with the first event of the run, not with what happens from now on.
        endless: go on when the run has ended, since it may be resumed.
    """

    def __init__(
        self,
        run_id: str,
        path: str,
        choose: Callable[[LiveEvent], Iterable[Item]],
        *,
        since_start: bool = False,
        endless: bool = False,
    ) -> None:
        self.ended = False
        self._run_id, self._path, self._choose, self._endless = run_id, path, choose, endless
        self._parser = EventParser(LIVE_START if since_start else "")
        self._heard = time.monotonic()

    def request(self) -> Request:
        self._parser.cut()
        last = {"Last-Event-ID": self._parser.last_id} if self._parser.last_id else {}
        return Request("GET", self._path, headers={"Accept": "text/event-stream", **last})

    def take(self, line: str) -> Iterator[Item]:
        self._heard = time.monotonic()
        for event in self._parser.take(line):
            if event.kind == "deleted":
                raise NotFound(f"run {self._run_id} was deleted", 404, "no-such-run")
            yield from self._choose(event)
            self.ended = event.kind == "ended" and not self._endless

    def lost(self, error: ServerAway | ApiError) -> None:
        if isinstance(error, ApiError) and error.status < 500 and error.status != 429:
            raise error
        if time.monotonic() - self._heard > AWAY_SECONDS:
            raise ServerAway(f"{error}. The run continues without this view") from error


def events(event: LiveEvent) -> Iterable[LiveEvent]:
    return (event,)


def updates(event: LiveEvent) -> Iterable[Update]:
    if event.kind == "observed":
        return (Update("state", event.data),)
    rows = event.data.get("rows") or event.data.get("items") or ()
    return [Update(KINDS[event.kind], row) for row in rows if event.kind in KINDS]


def steps(event: LiveEvent) -> Iterable[dict[str, Any]]:
    return [update.data for update in updates(event) if update.kind == "step"]


def _json(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise HostError(f"the live view does not answer like a Volley server: {text[:100]}") from error
