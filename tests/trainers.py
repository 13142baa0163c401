"""Other trainers as their adapters meet them: the real package where it is installed, else its signatures.

The stand-ins register and call as the sources linked at each do, and contain nothing else.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

Registry = dict[str, Any]


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


def verl() -> list[ModuleType]:
    """https://github.com/verl-project/verl/blob/1dda039b9c6311889a9c9a26040677e1254814f9/verl/trainer/ppo/core_algos.py"""
    registry: Registry = {}

    def register_adv_est(name_or_enum: str) -> Any:
        def decorator(fn: Any) -> Any:
            if registry.setdefault(name_or_enum, fn) is not fn:
                raise ValueError(f"Adv estimator {name_or_enum} has already been registered")
            return fn

        return decorator

    def get_adv_estimator_fn(name_or_enum: str) -> Any:
        return registry[name_or_enum]

    contents = {"register_adv_est": register_adv_est, "get_adv_estimator_fn": get_adv_estimator_fn}
    return [module("verl.trainer.ppo.core_algos", **contents)]


def skyrl() -> list[ModuleType]:
    """https://github.com/NovaSky-AI/SkyRL/blob/a9564572eb8e91076be43c1bd5e4615e3de17265/skyrl/backends/skyrl_train/utils/ppo_utils.py"""
    registry: Registry = {}

    def register_advantage_estimator(name: str) -> Any:
        def decorator(func: Callable[..., Any]) -> Any:
            if name in registry:
                raise ValueError(f"advantage estimator '{name}' already registered")
            registry[name] = func
            return func

        return decorator

    def compute_advantages_and_returns(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any,
        adv_estimator: str,
        config: Any,
        values: Tensor | None = None,
        grpo_norm_by_std: bool = True,
        gamma: float = 1.0,
        lambd: float = 1.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = registry[adv_estimator](
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            index=index,
            values=values,
            grpo_norm_by_std=grpo_norm_by_std,
            gamma=gamma,
            lambd=lambd,
            config=config,
            **kwargs,
        )
        return found

    return [
        module(
            "skyrl.backends.skyrl_train.utils.ppo_utils",
            register_advantage_estimator=register_advantage_estimator,
            compute_advantages_and_returns=compute_advantages_and_returns,
        )
    ]


def rllm() -> list[ModuleType]:
    """https://github.com/rllm-org/rllm/blob/9beb6e0f676a46d38858991fd79ac5f8e0b16d4c/rllm/trainer/algorithms/advantage.py"""
    registry: Registry = {}

    def register_rllm_adv_estimator(name: str) -> Callable[[Any], Any]:
        def decorator(func: Any) -> Any:
            registry[name] = func
            return func

        return decorator

    def get_rllm_adv_estimator(name: str) -> Any:
        return registry[name]

    return [
        module(
            "rllm.trainer.algorithms.advantage",
            register_rllm_adv_estimator=register_rllm_adv_estimator,
            get_rllm_adv_estimator=get_rllm_adv_estimator,
        )
    ]


def openrlhf() -> list[ModuleType]:
    """https://github.com/OpenRLHF/OpenRLHF/blob/3c3be6234e0cb353e76bb8019947db9dfe99fca7/openrlhf/trainer/ppo_utils/experience_maker.py"""

    class RemoteExperienceMaker:
        def __init__(
            self,
            actor_model_group: Any,
            critic_model_group: Any,
            reward_model_group: Any,
            initial_model_group: Any,
            kl_controller: Any,
            strategy: Any,
            tokenizer: Any,
            **kwargs: Any,
        ) -> None:
            self.strategy, self.args, self.kl_ctl = strategy, strategy.args, kl_controller

        def get_cumulative_returns(self, rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
            assert gamma == 1
            return (rewards * action_mask).flip(-1).cumsum(-1).flip(-1)

    def compute_reward(
        r: Tensor, kl_coef: float, kl: Tensor, action_mask: Tensor, reward_clip_range: Any = None
    ) -> Tensor:
        """The reward at each row's last action, and the KL penalty at each."""
        assert reward_clip_range is None
        last = (action_mask * torch.arange(1, kl.shape[1] + 1)).argmax(-1)
        reward = -kl_coef * kl
        reward[torch.arange(len(r)), last] += r
        return reward

    def apply_length_penalties(experiences: list[Any], args: Any) -> None:
        """The fixed reward of truncated samples, one of two penalties."""
        if args.reward.stop_properly_penalty_coef is not None:
            for each in experiences:
                each.rewards[each.truncated.bool()] = args.reward.stop_properly_penalty_coef

    return [
        module("openrlhf.models.utils", compute_reward=compute_reward),
        module("openrlhf.trainer.ppo_utils.length_penalty", apply_length_penalties=apply_length_penalties),
        module("openrlhf.trainer.ppo_utils.experience_maker", RemoteExperienceMaker=RemoteExperienceMaker),
        module("openrlhf.trainer.ppo_trainer", RemoteExperienceMaker=RemoteExperienceMaker),
    ]


@dataclass
class Experience:
    """The fields of `openrlhf.trainer.ppo_utils.experience.Experience` that advantages need."""

    rewards: Tensor
    action_mask: Tensor
    kl: Tensor | None
    index: list[int]
    truncated: Tensor
    info: dict[str, Tensor] = field(default_factory=dict)
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @property
    def response_length(self) -> Tensor:
        return self.action_mask.sum(-1)


def openrlhf_strategy(n: int, **changes: Any) -> SimpleNamespace:
    """The settings of OpenRLHF's command line that its experience maker reads."""
    settings: dict[str, Any] = {"estimator": "rloo", "clip_range": (-10, 10), "penalty": None, **changes}
    reward = SimpleNamespace(
        clip_range=settings["clip_range"], stop_properly_penalty_coef=settings["penalty"], overlong_buffer_len=None
    )
    advantage = SimpleNamespace(estimator=settings["estimator"], gamma=1.0)
    algo = SimpleNamespace(advantage=advantage)
    return SimpleNamespace(
        args=SimpleNamespace(algo=algo, reward=reward, rollout=SimpleNamespace(n_samples_per_prompt=n))
    )


STAND_INS: dict[str, Callable[[], list[ModuleType]]] = {
    "verl": verl,
    "skyrl": skyrl,
    "rllm": rllm,
    "openrlhf": openrlhf,
}


@contextmanager
def adapter(name: str) -> Iterator[Any]:
    """`volley.integrations.<name>`, imported afresh with the real package or the stand-in."""
    own = f"volley.integrations.{name}"
    stand_ins = STAND_INS[name]()
    with pytest.MonkeyPatch.context() as patch:
        try:
            importlib.import_module(stand_ins[0].__name__)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != name:
                raise
            for each in stand_ins:
                patch.setitem(sys.modules, each.__name__, each)
        patch.delitem(sys.modules, own, raising=False)
        try:
            yield importlib.import_module(own)
        finally:
            sys.modules.pop(own, None)
