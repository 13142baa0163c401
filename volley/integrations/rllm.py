"""Objectives of `volley.objectives` as advantage estimators of rLLM.

    register("other", {"kind": "max_at_k", "k": 8}, n=16)    # rllm.algorithm.adv_estimator=other

Source: `rllm/trainer/algorithms/advantage.py` and `config.py`, read in https://github.com/rllm-org/rllm at
9beb6e0f676a46d38858991fd79ac5f8e0b16d4c.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rllm.trainer.algorithms.advantage import register_rllm_adv_estimator

from volley.integrations.groups import answer_ids, mean_advantages, read_objective
from volley.objectives import BestOfK, MajAtK, Objective

Rewards: TypeAlias = Sequence[NDArray[np.float64]]  # of each group, one per trajectory
Estimator: TypeAlias = Callable[..., tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]]


def register(
    name: str,
    objective: Objective | Mapping[str, Any],
    n: int,
    *,
    answer_fn: Callable[[Any], Hashable | None] | None = None,
    rank_fn: Callable[[Any], float] | None = None,
) -> None:
    """Register the objective under a name, replacing what rLLM has under it.

    rLLM's configuration turns every name that it does not know into ``other``, so ``adv_estimator`` finds an objective
    registered as ``other`` only; ``traj_group_adv_estimator_map`` finds any name.

    Args:
        name: ``other``, or any name for ``traj_group_adv_estimator_map``.
        objective: an objective or its mapping.
        n: the number of rollouts per task; groups from which rLLM removed trajectories are smaller.
        answer_fn: for `maj_at_k`: the answer of a trajectory, None if it has none. Equal answers vote together.
        rank_fn: for `best_of_k`: the score by which a trajectory is picked.

    Raises:
        ValueError: the objective does not fit n, or a function that it needs is missing.
    """
    register_rllm_adv_estimator(name)(estimator(objective, n, answer_fn=answer_fn, rank_fn=rank_fn))


def estimator(
    objective: Objective | Mapping[str, Any],
    n: int,
    *,
    answer_fn: Callable[[Any], Hashable | None] | None = None,
    rank_fn: Callable[[Any], float] | None = None,
) -> Estimator:
    """A function of ``rewards``, ``algorithm_config`` and ``traj_groups``; its arguments are those of `register`."""
    parsed = read_objective(objective, n)
    if isinstance(parsed, MajAtK) and answer_fn is None:
        raise ValueError("maj_at_k needs answers: pass answer_fn=, a function from a trajectory to its answer")
    if isinstance(parsed, BestOfK) and rank_fn is None:
        raise ValueError("best_of_k needs ranks: pass rank_fn=, a function from a trajectory to its score")

    def compute(
        rewards: Rewards, algorithm_config: object = None, traj_groups: Sequence[Any] = (), **_: object
    ) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
        if not rewards:
            return [], []
        sizes = [len(group) for group in rewards]
        trajectories = [trajectory for group in traj_groups for trajectory in group.trajectories]
        advantage_B = mean_advantages(
            parsed,
            np.concatenate(rewards),
            np.repeat(np.arange(len(sizes)), sizes),
            n,
            answer_B=answer_ids(map(answer_fn, trajectories)) if answer_fn is not None else None,
            rank_B=[rank_fn(trajectory) for trajectory in trajectories] if rank_fn is not None else None,
        )
        by_group = np.split(advantage_B, np.cumsum(sizes)[:-1])
        return by_group, by_group

    return compute
