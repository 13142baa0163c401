"""Counts the rows of a data set that were dropped, by reason."""

from dataclasses import dataclass, field
from typing import Any

from services.data.readers import Row

EXAMPLES = 5  # locations kept per reason


@dataclass(slots=True)
class DropReport:
    """Number of dropped rows by reason, with the first few locations.

    Attributes:
        read: rows read.
    """

    read: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, row: Row) -> None:
        """Count a well-formed row that is dropped."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.examples.setdefault(reason, [])
        if len(places) < EXAMPLES:
            places.append(f"{row.path}:{row.number}")

    @property
    def dropped(self) -> int:
        return sum(self.counts.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, most frequent reason first."""
        ordered = sorted(self.counts, key=lambda reason: (-self.counts[reason], reason))
        return {
            "read": self.read,
            "dropped": [
                {"reason": reason, "count": self.counts[reason], "first": self.examples[reason]} for reason in ordered
            ],
        }

    def lines(self) -> list[str]:
        """Format the report for the terminal, one reason per line."""
        return [
            f"  {each['count']:>7}  {each['reason']}  (first: {each['first'][0]})" for each in self.as_json()["dropped"]
        ]
