"""The demo's comparison at equal divergence."""

import numpy as np
import pytest

from examples.countdown.demo import divergence_table


def test_runs_are_compared_where_they_are_as_far_from_the_start() -> None:
    """The first run goes twice as far in as many steps, and gains a third as much on the way."""

    def rows(pace: float, gain: float) -> list[dict[str, float]]:
        divergence = pace * np.arange(100)
        return [
            {"step": step, "kl_k1": float(kl), "pass_at_1": float(gain * kl), "pass_at_16": float(1 - gain * kl)}
            for step, kl in enumerate(divergence)
        ]

    table = divergence_table({"fast": rows(0.004, 1.0), "slow": rows(0.002, 3.0)})
    assert [column.header for column in table.columns] == ["trained for", "pass@1", "pass@16"]
    names, first, best = ([str(cell) for cell in column.cells] for column in table.columns)
    assert names == ["fast", "slow"]
    shared = float(str(table.title).split("at ")[1].split(" nats")[0])
    assert shared == pytest.approx(0.19, abs=0.012)  # the smaller end, smoothed
    assert [float(cell) for cell in first] == pytest.approx([100 * shared, 300 * shared], abs=3)
    assert [float(cell) for cell in best] == pytest.approx([100 - 100 * shared, 100 - 300 * shared], abs=3)
