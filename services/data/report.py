"""What was dropped of a data set, and why."""

from dataclasses import dataclass, field
from typing import Any

from services.data.readers import Row

EXAMPLES = 5  # places kept of each reason


@dataclass(slots=True)
class DropReport:
    """Counts by reason, with the first few places of each.

    Attributes:
        read: rows read.
    """

    read: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, row: Row) -> None:
        """Note that ``row`` was dropped; it is well-formed but not wanted."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.examples.setdefault(reason, [])
        if len(places) < EXAMPLES:
            places.append(f"{row.path}:{row.number}")

    @property
    def dropped(self) -> int:
        return sum(self.counts.values())

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object, most frequent reason first."""
        ordered = sorted(self.counts, key=lambda reason: (-self.counts[reason], reason))
        return {
            "read": self.read,
            "dropped": [
                {"reason": reason, "count": self.counts[reason], "first": self.examples[reason]} for reason in ordered
            ],
        }

    def lines(self) -> list[str]:
        """The report for people, one reason a line."""
        return [
            f"  {each['count']:>7}  {each['reason']}  (first: {each['first'][0]})" for each in self.as_json()["dropped"]
        ]
