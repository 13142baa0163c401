"""Batches from which nothing can be learned: too many in a row end the run with advice."""

from volley.errors import NoSignal


class DeadBatches:
    """Counts batches in a row in which no group gave a gradient.

    Args:
        limit: this many in a row end the run.
        in_a_row: how many there were when a resumed run was saved.
    """

    def __init__(self, limit: int, in_a_row: int = 0) -> None:
        self._limit, self.in_a_row = limit, in_a_row

    def note(self, live_group_fraction: float) -> None:
        """Count one more batch, given the share of its groups that gave a gradient. Raises `NoSignal` at the limit."""
        self.in_a_row = 0 if live_group_fraction > 0 else self.in_a_row + 1
        if self.in_a_row >= self._limit:
            raise NoSignal(
                f"{self.in_a_row} batches in a row in which every group's samples earned the same reward: nothing "
                "can be learned from them. Take easier or harder prompts, raise sampling.n, warm the model up first, "
                "or check the scorer on samples.jsonl"
            )
