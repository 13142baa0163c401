"""The estimator that verl and SkyRL call: token rewards of a batch in, token advantages out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from volley.integrations.groups import mean_advantages, read_reward_objective
from volley.objectives import Objective

Estimator: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


def estimator(objective: Objective | Mapping[str, Any], n: int) -> Estimator:
    """A function of ``token_level_rewards``, ``response_mask`` (both [B, T]) and ``index`` (ids of the prompts, [B]).

    Like the trainers' own GRPO, it sums a row's rewards and returns the row's advantage at each token of its response,
    twice: as advantages and as returns, [B, T]. A row without a token in the mask does not count in its group. Other
    keyword arguments are ignored.

    Args:
        objective: an objective or its mapping, such as ``{"kind": "max_at_k", "k": 8}``.
        n: the number of samples per prompt.

    Raises:
        ValueError: the objective does not fit n or needs more than rewards; calls raise what `mean_advantages` does.
    """
    parsed = read_reward_objective(objective, n)

    def compute(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], **_: object
    ) -> tuple[Tensor, Tensor]:
        reward_B = token_level_rewards.detach().double().sum(dim=-1).cpu().numpy()
        valid_B = response_mask.bool().any(dim=-1).cpu().numpy()
        advantage_B = torch.from_numpy(mean_advantages(parsed, reward_B, index, n, valid_B=valid_B))
        dtype = torch.promote_types(token_level_rewards.dtype, torch.float32)
        advantage_B = advantage_B.to(token_level_rewards.device, dtype)
        advantage_BT = advantage_B[:, None] * response_mask
        return advantage_BT, advantage_BT

    return compute
