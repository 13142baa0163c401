"""What the learner pool decides without any rank, and the steps' arithmetic."""

import math

import numpy as np
import pytest

from learner.engine import learning_rate
from learner.metrics import batch_metrics
from learner.pool import deal, stale
from learner.sums import Sums
from tests.learner_batches import random_group, scored
from volley.update import Optimizer


def test_groups_are_split_whole_into_similar_loads() -> None:
    rng = np.random.default_rng(0)
    costs = rng.integers(10, 200, 37).tolist()
    shares = deal(costs, 4)
    assert sorted(index for share in shares for index in share) == list(range(37))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs)
    assert deal([5], 3) == [[0], [], []]
    assert deal([], 2) == [[], []]


def test_groups_beyond_the_lag_are_reported() -> None:
    rng = np.random.default_rng(0)
    batch = [scored(random_group(rng, i, version=version), [0.0] * 4) for i, version in enumerate((3, 4, 5))]
    dropped = stale(batch, oldest=4)
    assert list(dropped) == [0]
    assert "version 3, the oldest allowed is 4" in dropped[0]


def test_batch_metrics_count_only_valid_samples() -> None:
    rng = np.random.default_rng(0)
    batch = [
        scored(random_group(rng, 0), [1.0, 0.0, 0.0, 0.0]),
        scored(random_group(rng, 1), [0.0, 0.0, 0.0, 9.0], valid_n=[True, True, True, False]),
    ]
    metrics = batch_metrics(batch, (1, 2, 4))
    assert metrics["reward_mean"] == pytest.approx(1 / 7)
    assert metrics["pass_at_1"] == pytest.approx((1 / 4 + 0) / 2)
    assert metrics["pass_at_2"] == pytest.approx((1 / 2 + 0) / 2)
    assert metrics["pass_at_4"] == 1.0  # the second group has three samples left


def test_the_learning_rate_warms_up_and_decays() -> None:
    warm = Optimizer(lr=1.0, warmup_steps=4)
    assert [learning_rate(warm, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = Optimizer(lr=2.0, warmup_steps=2, schedule="cosine")
    assert learning_rate(cosine, 2, 12) == 2.0
    assert learning_rate(cosine, 7, 12) == pytest.approx(1.0)
    assert learning_rate(cosine, 12, 12) == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(cosine, 99, 12) == pytest.approx(0.0, abs=1e-12)
    assert math.isclose(learning_rate(cosine, 4, 12), 1 + math.cos(math.pi * 0.2))


def test_sums_and_peaks_accumulate() -> None:
    import torch

    sums = Sums(torch.device("cpu"))
    sums.add(a=1.0, b=torch.tensor([2.0])[0])
    sums.add(a=torch.tensor(3, dtype=torch.int64))
    sums.peak(top=torch.tensor([0.5, 2.5]), none=torch.zeros(0))
    sums.peak(top=torch.tensor([1.0]))
    assert sums.total() == {"a": 4.0, "b": 2.0, "top": 2.5, "none": 0.0}
