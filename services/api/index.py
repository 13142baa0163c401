"""The list of all runs: filtering, paging and a summary per run.

A run's record never changes, so it is read once; states are read on every request. Runs that this release cannot read
are left out here, and named in the supervisor's log.
"""

import asyncio
import base64
import binascii
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.api.problems import Problem
from services.api.shared import SharedRead
from services.store.redis import Store
from volley.objectives.tries import with_tries
from volley.state import Desired, Observed, RunRecord, objective_text
from volley.views import RunPage, RunSummary, SeenState

AT_ONCE = 100  # runs read in one round trip
TRIES = ("k", "weights", "order")  # fields of an objective that the list shows
CURSOR_HINT = "send `next` of the previous page unchanged"
FRESH_SECONDS = 0.2
SPARK = 40  # values of a sparkline
SPARKS_KEPT = 2000  # runs whose sparkline is cached


@dataclass(frozen=True, slots=True)
class RunCard:
    """The part of a run's record that the list needs."""

    id: str
    name: str
    kind: str
    created: float
    tags: Mapping[str, str]
    steps: int
    objective: Mapping[str, Any]
    max_lag: int | None = None

    @classmethod
    def of(cls, record: RunRecord) -> "RunCard":
        job = record.job
        return cls(
            record.id,
            record.name,
            record.kind,
            record.created,
            record.tags,
            int(job.get("steps") or 0),
            {key: job["objective"][key] for key in ("kind", *TRIES) if key in job.get("objective", ())},
            job.get("max_lag"),
        )

    @property
    def place(self) -> tuple[float, str]:
        """The run's sort key; newer runs have greater ones."""
        return self.created, self.id


@dataclass(frozen=True, slots=True)
class Filter:
    """Which runs to list; None matches all."""

    state: SeenState | None = None
    kind: str | None = None
    name: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    id_prefix: str | None = None

    def matches(self, card: RunCard) -> bool:
        return (
            (self.kind is None or card.kind == self.kind)
            and (self.name is None or self.name.lower() in card.name.lower())
            and (self.id_prefix is None or card.id.startswith(self.id_prefix))
            and all(card.tags.get(key) == value for key, value in self.tags)
        )


class RunIndex:
    """All runs in one Redis."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cards: dict[str, RunCard] = {}  # as many as were read yet
        self._all = SharedRead(self._read_all, FRESH_SECONDS)  # by id, the newest first
        self._sparks: OrderedDict[str, tuple[tuple[int, int], list[float]]] = OrderedDict()

    async def page(self, criteria: Filter, *, limit: int, cursor: str | None = None) -> RunPage:
        """Return one page of runs, newest first. Raises `Problem` 422 for an invalid cursor."""
        before = None if cursor is None else place_of(cursor)
        cards = [
            card for card in await self.cards() if criteria.matches(card) and (before is None or card.place < before)
        ]
        at_once = AT_ONCE if criteria.state else min(AT_ONCE, limit + 1)
        found: list[tuple[RunCard, Desired, Observed]] = []
        for start in range(0, len(cards), at_once):
            runs = await self.read_states(cards[start : start + at_once])
            found += [run for run in runs if criteria.state in (None, seen_state(run[2]))]
            if len(found) > limit:
                break
        items = await asyncio.gather(*(self.summary(*each) for each in found[:limit]))
        more = cursor_of(found[limit - 1][0].place) if len(found) > limit else None
        return RunPage.model_construct(items=list(items), next=more)

    async def cards(self) -> list[RunCard]:
        """Return the cards of all runs, newest first."""
        return list((await self._all.get()).values())

    async def has(self, run_id: str) -> bool:
        """Return whether there is such a run. Recently seen runs are answered without asking Redis."""
        if run_id in await self._all.get():
            return True
        self.changed()  # it may be newer than the list
        return run_id in await self._all.get()

    async def read_states(self, cards: Iterable[RunCard]) -> list[tuple[RunCard, Desired, Observed]]:
        by_id = {card.id: card for card in cards}
        runs = await self._store.read_runs(list(by_id), unreadable={})
        return [(by_id[record.id], desired, observed) for record, desired, observed in runs]

    async def summary(self, card: RunCard, desired: Desired, observed: Observed) -> RunSummary:
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
            environment_workers=observed.environment_workers,
            objective=objective_text(with_tries(card.objective, desired.objective)),
            tags=dict(card.tags),
            spark=await self._spark(card.id, observed),
        )

    def changed(self) -> None:
        """Read the list again on the next request, because this server created or deleted a run."""
        self._all.expire()

    def forget(self, run_id: str) -> None:
        self._sparks.pop(run_id, None)
        self.changed()

    async def _read_all(self) -> dict[str, RunCard]:
        ids = await self._store.run_ids()
        cards = {name: self._cards[name] for name in ids if name in self._cards}
        missing = [name for name in ids if name not in cards]
        for start in range(0, len(missing), AT_ONCE):
            for record, _, _ in await self._store.read_runs(missing[start : start + AT_ONCE], unreadable={}):
                cards[record.id] = self._cards[record.id] = RunCard.of(record)
        self._cards = cards
        return {card.id: card for card in sorted(cards.values(), key=lambda card: card.place, reverse=True)}

    async def _spark(self, run_id: str, observed: Observed) -> list[float]:
        """Return the newest mean rewards; they are read again only when the run has made progress."""
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
    """Return the state as the API reports it."""
    return "lost" if observed.lost() else observed.state


def cursor_of(place: tuple[float, str]) -> str:
    """Encode a place in a list as opaque text."""
    return base64.urlsafe_b64encode(f"{place[0]!r} {place[1]}".encode()).decode().rstrip("=")


def place_of(cursor: str) -> tuple[float, str]:
    """Decode what `cursor_of` returned. Raises `Problem` 422 for anything else."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
        number, found, name = text.partition(" ")
        if not found:
            raise ValueError("no space")
        return float(number), name
    except (binascii.Error, ValueError) as error:
        raise Problem(422, "invalid-request", f"query/cursor: {CURSOR_HINT}") from error
