"""How many workers a pool should have, from the number of groups that wait for one. Looked at once per second."""

LOOK_EVERY_S = 1.0
LOOKS_AT_REST = 30


def next_count(count: int, waiting: int, quiet: int, *, low: int, high: int) -> int:
    """Return the new number of workers: doubled if more groups wait than there are workers, one fewer after idling.

    Args:
        count: current number of workers.
        waiting: number of groups waiting for a worker.
        quiet: number of consecutive checks that found no group waiting.
        low, high: bounds of the result.
    """
    if waiting > count:
        return min(high, 2 * count)
    return max(low, count - 1) if quiet >= LOOKS_AT_REST and count > low else count
