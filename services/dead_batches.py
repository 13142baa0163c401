"""Batches from which nothing can be learned: too many in a row end the run with advice."""

from volley.errors import NoSignal


class DeadBatches:
    """Counts them.

    Args:
        most: so many in a row are too many.
        in_a_row: of a resumed run.
    """

    def __init__(self, most: int, in_a_row: int = 0) -> None:
        self._most, self.in_a_row = most, in_a_row

    def note(self, live_group_fraction: float) -> None:
        """One more batch, of whose groups this share gave a gradient. Raises `NoSignal`."""
        self.in_a_row = 0 if live_group_fraction > 0 else self.in_a_row + 1
        if self.in_a_row >= self._most:
            raise NoSignal(
                f"{self.in_a_row} batches in a row in which every group's samples earned the same reward: nothing "
                "can be learned from them. Take easier or harder prompts, raise sampling.n, warm the model up first, "
                "or check the scorer on samples.jsonl"
            )
