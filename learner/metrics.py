"""Metrics of a batch's rewards, computed before the step."""

from collections.abc import Sequence

import numpy as np

from learner.records import ScoredGroup
from volley.objectives import max_at_k


def batch_metrics(batch: Sequence[ScoredGroup], ks: Sequence[int]) -> dict[str, float]:
    """Mean reward, and for each k the unbiased max@k, mean over the groups with at least k valid samples."""
    rewards = [scored.rewards_n[scored.valid_n] for scored in batch]
    metrics = {"reward_mean": float(np.mean(np.concatenate(rewards)))}
    sizes = sorted({len(reward_n) for reward_n in rewards})
    tables = [np.stack([reward_n for reward_n in rewards if len(reward_n) == size]) for size in sizes]
    for k in ks:
        values = [np.atleast_1d(max_at_k(rewards_gn, k)) for rewards_gn in tables if rewards_gn.shape[1] >= k]
        if values:
            metrics[f"pass_at_{k}"] = float(np.mean(np.concatenate(values)))
    return metrics
