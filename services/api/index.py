"""All runs at a glance: which there are, those that match a filter, and a summary of each.

A run's record never changes, so it is read once; states are read when they are asked for.
"""

import asyncio
import base64
import binascii
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.api.problems import Problem
from services.api.schemas import RunPage, RunSummary, SeenState
from services.state import Desired, Observed, RunRecord
from services.store import Store

AT_ONCE = 100  # runs read in one round trip
FRESH_SECONDS = 0.2
SPARK = 40
SPARKS_KEPT = 2000

Look = tuple[RunRecord, Desired, Observed]


@dataclass(frozen=True, slots=True)
class Card:
    """What a list needs of a record."""

    id: str
    name: str
    kind: str
    created: float
    tags: Mapping[str, str]
    steps: int
    objective: Mapping[str, Any]
    max_lag: int | None = None

    @classmethod
    def of(cls, record: RunRecord) -> "Card":
        job = record.job
        return cls(
            record.id,
            record.name,
            record.kind,
            record.created,
            record.tags,
            int(job.get("steps") or 0),
            {key: job["objective"][key] for key in ("kind", "k") if key in job.get("objective", ())},
            job.get("max_lag"),
        )

    @property
    def place(self) -> tuple[float, str]:
        """In the order of a list; newer runs have higher ones."""
        return self.created, self.id


@dataclass(frozen=True, slots=True)
class Filter:
    """Runs that are wanted; None takes all."""

    state: SeenState | None = None
    kind: str | None = None
    name: str | None = None
    tags: tuple[tuple[str, str], ...] = ()

    def takes(self, card: Card) -> bool:
        return (
            (self.kind is None or card.kind == self.kind)
            and (self.name is None or self.name.lower() in card.name.lower())
            and all(card.tags.get(key) == value for key, value in self.tags)
        )


class RunIndex:
    """The runs in one Redis."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cards: dict[str, Card] = {}
        self._order: list[Card] = []  # newest first
        self._at = float("-inf")
        self._busy = asyncio.Lock()
        self._sparks: OrderedDict[str, tuple[tuple[int, int], list[float]]] = OrderedDict()

    async def page(self, wanted: Filter, *, limit: int, cursor: str | None = None) -> RunPage:
        """Newest first. Raises `Problem` 422 for a cursor that is none."""
        before = None if cursor is None else place_of(cursor)
        cards = [card for card in await self.cards() if wanted.takes(card) and (before is None or card.place < before)]
        at_once = AT_ONCE if wanted.state else min(AT_ONCE, limit + 1)
        found: list[tuple[Card, Desired, Observed]] = []
        for start in range(0, len(cards), at_once):
            looked = await self.look(cards[start : start + at_once])
            found += [each for each in looked if wanted.state in (None, seen_state(each[2]))]
            if len(found) > limit:
                break
        items = await asyncio.gather(*(self.summary(*each) for each in found[:limit]))
        more = cursor_of(found[limit - 1][0].place) if len(found) > limit else None
        return RunPage.model_construct(items=list(items), next=more)

    async def cards(self) -> list[Card]:
        """Of all runs, newest first."""
        async with self._busy:
            if time.monotonic() - self._at >= FRESH_SECONDS:
                await self._refresh()
        return self._order

    async def has(self, run_id: str) -> bool:
        """Is there such a run? Of one that was there a moment ago Redis is not asked."""
        await self.cards()
        if run_id not in self._cards:
            self.changed()  # it may be younger than the list
            await self.cards()
        return run_id in self._cards

    async def look(self, cards: Iterable[Card]) -> list[tuple[Card, Desired, Observed]]:
        by_id = {card.id: card for card in cards}
        looked = await self._store.look(list(by_id))
        return [(by_id[record.id], desired, observed) for record, desired, observed in looked]

    async def summary(self, card: Card, desired: Desired, observed: Observed) -> RunSummary:
        return RunSummary.model_construct(
            id=card.id,
            name=card.name,
            kind=card.kind,
            state=seen_state(observed),
            step=observed.step,
            steps=observed.steps or card.steps,
            created=card.created,
            updated=observed.updated or card.created,
            problem=observed.problem,
            actors=observed.actors,
            reward_workers=observed.reward_workers,
            objective=objective_text({**card.objective, **desired.objective}),
            tags=dict(card.tags),
            spark=await self._spark(card.id, observed),
        )

    def changed(self) -> None:
        """A run was made or deleted here: read the list again at once."""
        self._at = float("-inf")

    def forget(self, run_id: str) -> None:
        self._sparks.pop(run_id, None)
        self.changed()

    async def _refresh(self) -> None:
        ids = await self._store.run_ids()
        missing = [name for name in ids if name not in self._cards]
        for start in range(0, len(missing), AT_ONCE):
            for record, _, _ in await self._store.look(missing[start : start + AT_ONCE]):
                self._cards[record.id] = Card.of(record)
        if missing or len(ids) != len(self._cards):
            self._cards = {name: self._cards[name] for name in ids if name in self._cards}
        self._order = sorted(self._cards.values(), key=lambda card: card.place, reverse=True)
        self._at = time.monotonic()

    async def _spark(self, run_id: str, observed: Observed) -> list[float]:
        """The newest rewards; read again only when the run has come on."""
        at = (observed.life, observed.step)
        known = self._sparks.get(run_id)
        if known is not None and known[0] == at:
            self._sparks.move_to_end(run_id)
            return known[1]
        rewards: dict[int, float] = {}
        for _, row in await self._store.newest(run_id, "metrics", SPARK):
            for later in [step for step in rewards if step >= row["step"]]:
                del rewards[later]
            if isinstance(row.get("reward_mean"), int | float):
                rewards[row["step"]] = float(row["reward_mean"])
        spark = [value for value in rewards.values() if value == value]
        self._sparks[run_id] = (at, spark)
        if len(self._sparks) > SPARKS_KEPT:
            self._sparks.popitem(last=False)
        return spark


def seen_state(observed: Observed) -> SeenState:
    """The state as the API tells it."""
    return "lost" if observed.lost() else observed.state


def objective_text(objective: Mapping[str, Any]) -> str:
    """``max_at_k k=8``."""
    kind = str(objective.get("kind", ""))
    return f"{kind} k={objective['k']}" if kind and "k" in objective else kind


def cursor_of(place: tuple[float, str]) -> str:
    """An opaque text for a place in a list."""
    return base64.urlsafe_b64encode(f"{place[0]!r} {place[1]}".encode()).decode().rstrip("=")


def place_of(cursor: str) -> tuple[float, str]:
    """The inverse of `cursor_of`; raises `Problem` 422."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
        number, found, name = text.partition(" ")
        if not found:
            raise ValueError("no blank")
        return float(number), name
    except (binascii.Error, ValueError) as error:
        raise Problem(422, "invalid-request", "query/cursor: give `next` of the page before, as it was") from error
