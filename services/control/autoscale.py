"""How many actors a run should have: one more while the learner starves for groups, one fewer while it never waits."""

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 30  # looks between two decisions, one look per second
STARVING, FED = 0.3, 0.05  # shares of looks at which the learner waits


@dataclass(frozen=True, slots=True)
class Look:
    """The run at one moment: whether the learner waits for groups, and how many groups are in which stage."""

    waiting: bool
    generating: int
    scoring: int


def next_count(count: int, looks: Sequence[Look], *, low: int, high: int) -> int:
    """The number of actors to have after ``looks``. Fewer than `WINDOW` of them decide nothing.

    Args:
        count: actors now.
        low, high: bounds.
    """
    if len(looks) < WINDOW:
        return count
    starving = sum(look.waiting for look in looks) / len(looks)
    generating = sum(look.generating for look in looks) > sum(look.scoring for look in looks)
    if starving > STARVING and generating:
        return min(high, count + 1)
    return max(low, count - 1) if starving < FED else count
