"""The ledger: every admitted group reaches exactly one end."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from volley.errors import AccountingError


@dataclass(slots=True)
class Ledger:
    """``admitted = trained + dropped + in flight``, at every moment.

    Attributes:
        admitted: groups admitted; also the next group's id.
        trained: group id -> the step that trained it.
        dropped: group id -> why it was dropped.
        in_flight: ids admitted and not yet at an end.
    """

    admitted: int = 0
    trained: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)

    def admit(self) -> int:
        """Admit one group and return its id."""
        group_id = self.admitted
        self.admitted += 1
        self.in_flight.add(group_id)
        return group_id

    def train(self, group_id: int, step: int) -> None:
        self._end(group_id)
        self.trained[group_id] = step

    def drop(self, group_id: int, reason: str) -> None:
        self._end(group_id)
        self.dropped[group_id] = reason

    def reasons(self) -> Counter[str]:
        """How many groups were dropped, by reason."""
        return Counter(self.dropped.values())

    def counts(self) -> dict[str, int]:
        """How many groups are where."""
        return {
            "admitted": self.admitted,
            "trained": len(self.trained),
            "dropped": len(self.dropped),
            "in_flight": len(self.in_flight),
        }

    def state(self) -> dict[str, Any]:
        """What a resumed run must know: group ids are positions in the seeded order of prompts."""
        return {"admitted": self.admitted, "in_flight": sorted(self.in_flight), "dropped": dict(self.dropped)}

    def check(self) -> None:
        """Raise `AccountingError` unless every admitted group is in exactly one place."""
        # `_end` lets no group end twice, so equal counts mean that every group is in exactly one place.
        if len(self.trained) + len(self.dropped) + len(self.in_flight) != self.admitted:
            raise AccountingError(
                f"admitted {self.admitted} != trained {len(self.trained)} + dropped {len(self.dropped)} "
                f"+ in flight {len(self.in_flight)}"
            )

    def _end(self, group_id: int) -> None:
        if group_id not in self.in_flight:
            raise AccountingError(f"group {group_id} reached a second end, or was never admitted")
        self.in_flight.remove(group_id)
