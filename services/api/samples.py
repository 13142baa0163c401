"""An in-memory index of each run's samples, fed from the tail of the stream, so that searches do not read all samples.

A resumed run writes the excerpts of some steps again; the later ones replace the earlier. Samples are listed newest
step first, and within a step as the run wrote them: group by group, best reward first.
"""

import asyncio
import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from services.api.shared import SharedRead
from services.store.redis import Entry, Store

PAGE = 100  # samples, which are large, parsed before other tasks get a turn
FRESH_SECONDS = 0.2
RUNS = 32  # runs whose index is kept
AT_ONCE = 16  # ranges of one page that are read concurrently


@dataclass(frozen=True, slots=True)
class SampleCard:
    """The part of a sample that searches need. ``before`` is the id of the preceding entry in the stream."""

    id: str
    before: str
    step: int
    group: int
    status: str
    prompt_id: str
    reward: float | None


Predicate = Callable[[SampleCard], bool]


class SampleIndex:
    """The samples of the most recently requested runs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: OrderedDict[str, _Followed] = OrderedDict()

    async def page(
        self, run_id: str, matches: Predicate, *, limit: int, after: tuple[int, str] | None = None
    ) -> tuple[list[Entry], tuple[int, str] | None]:
        """Return one page of matching samples, and where the next page begins (None if there is none).

        Args:
            after: step and id of the last sample of the previous page.
        """
        followed = self._runs.setdefault(run_id, _Followed(self._store, run_id))
        self._runs.move_to_end(run_id)
        if len(self._runs) > RUNS:
            self._runs.popitem(last=False)
        await followed.newest.get()
        found: list[SampleCard] = []
        for card in followed.cards(after):
            if matches(card):
                found.append(card)
                if len(found) > limit:
                    break
        page = found[:limit]
        more = (page[-1].step, page[-1].id) if len(found) > limit else None
        return await self._read(run_id, page), more

    def forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    async def _read(self, run_id: str, cards: list[SampleCard]) -> list[Entry]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(run: list[SampleCard]) -> list[Entry]:
            async with gate:
                found = await self._store.entries(run_id, "samples", after=run[0].before, count=len(run))
            own = {card.id for card in run}  # if the stream was trimmed, the read returns other entries instead
            return [entry for entry in found if entry[0] in own]

        parts = await asyncio.gather(*map(one, _neighbours(cards)))
        return [entry for part in parts for entry in part]


class _Followed:
    """One run's cards by step, and the position in the stream up to which they were read."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self.newest = SharedRead(self._catch_up, FRESH_SECONDS)  # the id of the newest
        self._by_step: dict[int, list[SampleCard]] = {}
        self._steps: list[int] = []  # ascending
        self._last = "0-0"

    async def _catch_up(self) -> str:
        while True:
            entries = await self._store.entries(self._run_id, "samples", after=self._last, count=PAGE)
            for name, row in entries:
                self._add(name, row)
            if len(entries) < PAGE:
                return self._last
            await asyncio.sleep(0)

    def cards(self, after: tuple[int, str] | None) -> Iterable[SampleCard]:
        """Yield the cards in listing order."""
        for step in reversed(self._steps):
            if after is not None and step > after[0]:
                continue
            cards = self._by_step[step]
            begin = 0
            if after is not None and step == after[0]:
                begin = bisect.bisect_right(cards, entry_order(after[1]), key=lambda card: entry_order(card.id))
            yield from cards[begin:]

    def _add(self, name: str, row: dict[str, Any]) -> None:
        step, group = int(row["step"]), int(row["group"])
        if self._written_again(step, group):
            self._forget_from(step)
        if step not in self._by_step:
            self._by_step[step] = []
            self._steps.append(step)
        self._by_step[step].append(
            SampleCard(name, self._last, step, group, str(row["status"]), str(row["prompt_id"]), row["reward"])
        )
        self._last = name

    def _written_again(self, step: int, group: int) -> bool:
        """Whether a resumed run writes this sample again: the step goes back, or the group appears a second time."""
        if not self._steps or step > self._steps[-1]:
            return False
        if step < self._steps[-1]:
            return True
        cards = self._by_step[step]
        return cards[-1].group != group and any(card.group == group for card in cards)

    def _forget_from(self, step: int) -> None:
        kept = bisect.bisect_left(self._steps, step)
        for later in self._steps[kept:]:
            del self._by_step[later]
        del self._steps[kept:]


def entry_order(name: str) -> tuple[int, int]:
    """Return the sort key of a stream id: its two numbers."""
    milliseconds, _, number = name.partition("-")
    return int(milliseconds), int(number)


def _neighbours(cards: list[SampleCard]) -> list[list[SampleCard]]:
    """Split ``cards`` into runs of entries that are adjacent in the stream."""
    parts: list[list[SampleCard]] = []
    for card in cards:
        if parts and card.before == parts[-1][-1].id:
            parts[-1].append(card)
        else:
            parts.append([card])
    return parts
