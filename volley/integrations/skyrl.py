"""Objectives of `volley.objectives` as advantage estimators of SkyRL.

    register("max_at_8", {"kind": "max_at_k", "k": 8}, n=16)    # trainer.algorithm.advantage_estimator=max_at_8

Source: `skyrl/backends/skyrl_train/utils/ppo_utils.py`, read in 0.4.0 and in https://github.com/NovaSky-AI/SkyRL at
a9564572eb8e91076be43c1bd5e4615e3de17265.
"""

from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator

from volley.integrations.token_level import estimator
from volley.objectives import Objective


def register(name: str, objective: Objective | Mapping[str, Any], n: int) -> None:
    """Register the objective as ``trainer.algorithm.advantage_estimator=<name>``; SkyRL copies it to its Ray processes.

    Args:
        name: new to SkyRL.
        objective: an objective or its mapping.
        n: ``generator.n_samples_per_prompt``.

    Raises:
        ValueError: the objective does not fit n or needs more than rewards, or the name is taken.
    """
    register_advantage_estimator(name)(estimator(objective, n))
