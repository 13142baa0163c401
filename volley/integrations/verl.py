"""Objectives of `volley.objectives` as advantage estimators of verl.

    register("max_at_8", {"kind": "max_at_k", "k": 8}, n=16)    # algorithm.adv_estimator=max_at_8

Source: `verl/trainer/ppo/core_algos.py` and `compute_advantage` in `verl/trainer/ppo/ray_trainer.py`, read in 0.9.1 and
in https://github.com/verl-project/verl at 1dda039b9c6311889a9c9a26040677e1254814f9.
"""

from collections.abc import Mapping
from typing import Any

from verl.trainer.ppo.core_algos import register_adv_est

from volley.integrations.token_level import estimator
from volley.objectives import Objective


def register(name: str, objective: Objective | Mapping[str, Any], n: int) -> None:
    """Register the objective as ``algorithm.adv_estimator=<name>``, in this process.

    Args:
        name: new to verl.
        objective: an objective or its mapping.
        n: ``actor_rollout_ref.rollout.n``.

    Raises:
        ValueError: the objective does not fit n or needs more than rewards, or the name is taken.
    """
    register_adv_est(name)(estimator(objective, n))
