"""How many actors a run should have: one more while the learner starves for groups, one fewer while it never does."""

from collections.abc import Sequence
from dataclasses import dataclass

LOOKS = 30  # one a second, between two decisions
STARVING, FED = 0.3, 0.05


@dataclass(frozen=True, slots=True)
class Look:
    """The run at one moment: does the learner wait for groups, and where are they?"""

    waiting: bool
    generating: int
    scoring: int


def next_count(count: int, looks: Sequence[Look], *, low: int, high: int) -> int:
    """Actors wanted after ``looks``, the newest of which decides nothing alone.

    Args:
        count: actors now.
        low, high: bounds.
    """
    if len(looks) < LOOKS:
        return count
    starving = sum(look.waiting for look in looks) / len(looks)
    generating = sum(look.generating for look in looks) > sum(look.scoring for look in looks)
    if starving > STARVING and generating:
        return min(high, count + 1)
    return max(low, count - 1) if starving < FED else count
