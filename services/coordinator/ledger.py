"""The ledger: every admitted group ends exactly once, trained or dropped."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from volley.errors import AccountingError


@dataclass(slots=True)
class Ledger:
    """Counts of groups, for which ``admitted = trained + dropped + in flight`` holds at all times.

    Attributes:
        admitted: groups admitted; also the id of the next group, which is its position in the order of prompts.
        trained: groups trained on.
        dropped: groups dropped, by reason.
        dead: groups without a gradient, trained on or dropped; they are among those.
        in_flight: ids of groups that are admitted and have not ended.
    """

    admitted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    in_flight: set[int] = field(default_factory=set)
    dead: int = 0

    def admit(self) -> int:
        """Admit one group and return its id."""
        group_id = self.admitted
        self.admitted += 1
        self.in_flight.add(group_id)
        return group_id

    def train(self, group_id: int, *, dead: bool = False) -> None:
        self._end(group_id)
        self.trained += 1
        self.dead += dead

    def drop(self, group_id: int, reason: str, *, dead: bool = False) -> None:
        self._end(group_id)
        self.dropped[reason] += 1
        self.dead += dead

    def end_batch(self, groups: Iterable[int], dropped: Mapping[int, str], dead: Container[int]) -> None:
        """End the groups of a batch: those in ``dropped`` for the reason given there, all others as trained on."""
        for group_id in groups:
            if group_id in dropped:
                self.drop(group_id, dropped[group_id])
            else:
                self.train(group_id, dead=group_id in dead)
        self.check()

    def counts(self) -> dict[str, int]:
        """The number of groups admitted, trained, dropped and in flight, and of dead ones among them."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": self.dropped.total(),
            "in_flight": len(self.in_flight),
            "dead": self.dead,
        }

    def state(self) -> dict[str, Any]:
        """The whole ledger as JSON."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "in_flight": sorted(self.in_flight),
            "dead": self.dead,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Ledger":
        """The ledger that `state` returned; raises `AccountingError` if it does not add up."""
        dropped, in_flight = Counter(state["dropped"]), set(state["in_flight"])
        ledger = cls(state["admitted"], state["trained"], dropped, in_flight, state.get("dead", 0))
        ledger.check()
        return ledger

    def check(self) -> None:
        """Raise `AccountingError` unless every admitted group is in exactly one place."""
        # `_end` lets no group end twice, so equal counts mean that every group is in exactly one place.
        if self.trained + self.dropped.total() + len(self.in_flight) != self.admitted:
            raise AccountingError(
                f"admitted {self.admitted} != trained {self.trained} + dropped {self.dropped.total()} "
                f"+ in flight {len(self.in_flight)}"
            )

    def _end(self, group_id: int) -> None:
        if group_id not in self.in_flight:
            raise AccountingError(f"group {group_id} has ended already, or was never admitted")
        self.in_flight.remove(group_id)
