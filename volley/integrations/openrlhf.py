"""Objectives of `volley.objectives` in OpenRLHF, in place of its group baselines.

    install({"kind": "max_at_k", "k": 8})    # in each process that trains, before its trainer is created

OpenRLHF has no registry of estimators: its trainers create a `RemoteExperienceMaker`, which `install` replaces.
Generation, rewards, length penalties, the KL penalty and the loss remain OpenRLHF's.

Source: `openrlhf/trainer/ppo_utils/experience_maker.py` and `openrlhf/trainer/ppo_trainer.py`, read in 0.11.2 and in
https://github.com/OpenRLHF/OpenRLHF at 3c3be6234e0cb353e76bb8019947db9dfe99fca7.

Shapes: B samples of a batch, A actions (tokens that the policy wrote).
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties
from torch import Tensor

from volley.integrations.groups import mean_advantages, read_reward_objective
from volley.objectives import Objective, parse_objective


def install(objective: Objective | Mapping[str, Any]) -> None:
    """Let OpenRLHF's trainers of this process, synchronous and asynchronous, use the objective.

    Raises:
        ValueError: it is not an objective. A trainer raises what `KSampleExperienceMaker` does.
    """
    maker = partial(KSampleExperienceMaker, objective=parse_objective(objective))
    trainers: Any = import_module("openrlhf.trainer.ppo_trainer")
    trainers.RemoteExperienceMaker = maker


class KSampleExperienceMaker(RemoteExperienceMaker):  # type: ignore[misc]
    """OpenRLHF's experience maker with a k-sample objective; n is ``rollout.n_samples_per_prompt``.

    Args:
        objective: an objective or its mapping, over rewards alone.
        maker: all arguments of `RemoteExperienceMaker`.

    Raises:
        ValueError: a critic is trained, or the objective does not fit n or needs more than rewards.
    """

    def __init__(self, *maker: object, objective: Objective | Mapping[str, Any], **named: object) -> None:
        super().__init__(*maker, **named)
        self.n: int = self.args.rollout.n_samples_per_prompt
        self.objective = read_reward_objective(objective, self.n)
        if self.args.algo.advantage.estimator == "gae":
            raise ValueError(
                "algo.advantage.estimator gae trains a critic, which the objective does not use: write "
                "--algo.advantage.estimator rloo"
            )

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        """The experiences with advantages and returns, [B, A]; a sample without an action is dropped from its group.

        ``reward.clip_range`` limits rewards. OpenRLHF applies it to what its baselines leave of them.
        """
        apply_length_penalties(experiences, self.args)
        advantage_B = self._advantages(experiences)
        sizes = [len(each.index) for each in experiences]
        for experience, advantage_E in zip(experiences, torch.split(advantage_B, sizes), strict=True):
            token_EA = compute_reward(advantage_E, self.kl_ctl.value, experience.kl, action_mask=experience.action_mask)
            experience.returns = self.get_cumulative_returns(token_EA, experience.action_mask, 1.0)
            experience.advantages = experience.returns.clone()
            experience.info["return"] = token_EA.sum(dim=-1)
            experience.kl = None
        return experiences

    def _advantages(self, experiences: list[Any]) -> Tensor:
        """Advantages for a mean over samples in the order of the experiences, [B]."""
        reward_B = torch.cat([each.rewards for each in experiences]).double()
        if self.args.reward.clip_range:
            reward_B = reward_B.clamp(*self.args.reward.clip_range)
        # an index is a sample's place in the batch as it was sampled, where the n of a prompt are side by side
        prompt_B = [place // self.n for each in experiences for place in each.index]
        valid_B = torch.cat([each.action_mask.bool().any(dim=-1) for each in experiences])
        advantage_B = mean_advantages(self.objective, reward_B.cpu().numpy(), prompt_B, self.n, valid_B=valid_B.cpu())
        return torch.from_numpy(advantage_B).float()
