"""What a batch's rewards say, before any tensor is touched."""

from collections.abc import Sequence

import numpy as np

from learner.records import ScoredGroup
from volley.objectives import max_at_k


def batch_metrics(batch: Sequence[ScoredGroup], ks: Sequence[int]) -> dict[str, float]:
    """Mean reward, max@k within groups for each k, and the share of groups that can give a gradient."""
    rewards = [scored.rewards_n[scored.valid_n] for scored in batch]
    full = [reward_n for reward_n in rewards if len(reward_n) >= max(ks, default=1)]
    metrics = {
        "reward_mean": float(np.mean(np.concatenate(rewards))) if rewards else float("nan"),
        "live_group_fraction": float(np.mean([np.ptp(reward_n) > 0 for reward_n in rewards])) if rewards else 0.0,
    }
    if full:
        for k in ks:
            metrics[f"pass_at_{k}"] = float(np.mean([max_at_k(reward_n, k) for reward_n in full]))
    return metrics
