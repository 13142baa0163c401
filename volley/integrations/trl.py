"""TRL's `GRPOTrainer` with the objectives of `volley.objectives` instead of its group-centred rewards.

    trainer = KSampleGRPOTrainer(objective=MaxAtK(k=8), args=GRPOConfig(..., scale_rewards="none"), model=..., ...)

Generation, rewards, loss, logging and checkpoints remain TRL's. As TRL has no hook for advantages, two of its methods
are extended: one records the rewards of all processes, the other replaces the advantages computed from them.

TRL's losses are means over all samples, so advantages are scaled as `volley.integrations.groups` says. `loss_type`
corresponds to these settings of `volley.update.PolicyUpdate`:

    dapo      aggregation: token_mean
    bnpo      the same within each micro-batch
    grpo      aggregation: sequence_mean
    dr_grpo   aggregation: sequence_sum, divided by max_completion_length

Shapes: B samples of all processes, the n of a prompt side by side; F reward functions; T tokens.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from volley.integrations.groups import answer_ids, mean_scale
from volley.objectives import (
    BestOfK,
    MajAtK,
    MaxAtK,
    Objective,
    ObjectiveWithK,
    PassAtKAnalytic,
    advantages,
    check_objective,
    maj_at_k,
    max_at_k,
    parse_objective,
)
from volley.objectives.tries import mean_over

AnswerFn: TypeAlias = Callable[[Any], Hashable | None]
Row: TypeAlias = dict[str, object]  # of the dataset


class KSampleGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with a k-sample objective; n is ``args.num_generations``.

    A sample is dropped from its group, which reduces n, if every reward function returns None for it or TRL masks all
    its tokens (``mask_truncated_completions``). The objective's metric is logged as ``max_at_<k>`` or ``maj_at_<k>``,
    and with weights the weighted mean as ``max_at_weights`` or ``maj_at_weights``. Evaluation keeps TRL's loss.

    Args:
        objective: an objective or its mapping, such as ``{"kind": "max_at_k", "k": 8}``. A callback may assign
            `self.objective` during training, for example to anneal k as PKPO does.
        args: TRL's configuration, with ``scale_rewards="none"``.
        answer_fn: for `maj_at_k`: extracts the answer from a completion in the form that reward functions get; None if
            it has no answer. Equal answers vote together, also across processes, so they must pickle.
        trainer: all other arguments of `GRPOTrainer`.

    Raises:
        ValueError: a setting conflicts with the objective; the message says what to write instead.
    """

    def __init__(
        self,
        *,
        objective: Objective | Mapping[str, Any],
        args: GRPOConfig,
        answer_fn: AnswerFn | None = None,
        **trainer: Any,
    ) -> None:
        self.objective, self.answer_fn = parse_objective(objective), answer_fn
        check_settings(self.objective, args, has_answers=answer_fn is not None)
        super().__init__(args=args, **trainer)

    def _calculate_rewards(
        self,
        inputs: list[Row],
        prompts: list[object],
        completions: list[object],
        completion_ids_list: list[list[int]],
    ) -> Tensor:
        """TRL's rewards of all processes, [B, F]; records them, and the answers if there is an ``answer_fn``."""
        rewards_BF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_B = weighted_rewards(rewards_BF, self.reward_weights)
        self._answers_B = None
        if self.answer_fn is not None:
            self._answers_B = answer_ids(gather_object([self.answer_fn(completion) for completion in completions]))
        return rewards_BF

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        """TRL's batch of this process with the advantages replaced."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mode, n = ("train", self.num_generations) if self.model.training else ("eval", self.num_generations_eval)
        in_loss_B = self.accelerator.gather(batch["completion_mask"].any(dim=-1)).cpu().numpy()
        valid_B = ~np.isnan(self._rewards_B) & in_loss_B
        for name, value in objective_metric(self.objective, self._rewards_B, self._answers_B, valid_B, n).items():
            self._metrics[mode][name].append(value)
        if mode == "train":
            advantage_B = mean_advantages(self.objective, self._rewards_B, self._answers_B, valid_B, n)
            self._replace_advantages(batch, advantage_B)
        return batch

    def _replace_advantages(self, batch: dict[str, Any], advantage_B: NDArray[np.float64]) -> None:
        """Replace them in this process's batch and in the log of completions, which covers all processes."""
        local = batch["advantages"]
        first = self.accelerator.process_index * len(local)
        batch["advantages"] = torch.from_numpy(advantage_B[first : first + len(local)]).to(local)
        log = self._logs["advantages"]
        for _ in range(min(len(log), len(advantage_B))):
            log.pop()
        log.extend(advantage_B.tolist())


def check_settings(objective: Objective, args: GRPOConfig, *, has_answers: bool) -> None:
    """Reject TRL settings under which something other than the objective would be optimised.

    Raises:
        ValueError: names the change to make.
    """
    check_objective(objective, args.num_generations)
    if args.scale_rewards != "none":
        raise ValueError(
            f"scale_rewards={args.scale_rewards!r} normalises TRL's advantages, which are replaced: write "
            'scale_rewards="none", and normalize: std in the objective to divide by the group\'s standard deviation'
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={args.multi_objective_aggregation!r} normalises each reward, but the "
            'objective needs their weighted sum: write multi_objective_aggregation="sum_then_normalize"'
        )
    if isinstance(objective, BestOfK):
        raise ValueError(
            "best_of_k needs a rank beside each reward, and TRL's reward functions return rewards only: write kind: "
            "max_at_k, or call volley.objectives.advantages with ranks="
        )
    if isinstance(objective, MaxAtK | MajAtK) and objective.companion_weights != "none":
        raise ValueError(
            f"companion_weights: {objective.companion_weights} weighs samples of older policies, but TRL samples from "
            "the policy it trains: write companion_weights: none"
        )
    if isinstance(objective, MajAtK) and not has_answers:
        raise ValueError("maj_at_k needs answers: pass answer_fn=, a function from a completion to its answer")


def weighted_rewards(rewards_BF: Tensor, weight_F: Tensor) -> NDArray[np.float64]:
    """The weighted sum of each sample's rewards as in TRL, [B]; NaN if no function returned a reward."""
    wide_BF = rewards_BF.detach().cpu().double().numpy()
    total_B: NDArray[np.float64] = np.nansum(wide_BF * weight_F.cpu().double().numpy(), axis=-1)
    return np.where(np.isnan(wide_BF).all(axis=-1), np.nan, total_B)


def mean_advantages(
    objective: Objective,
    reward_B: NDArray[np.float64],
    answer_B: NDArray[np.int64] | None,
    valid_B: NDArray[np.bool_],
    n: int,
) -> NDArray[np.float64]:
    """Advantages for a mean over all samples, [B]: n times the objective's, see the module's docstring."""
    advantage_Pn = advantages(
        np.where(valid_B, reward_B, 0.0).reshape(-1, n),
        objective,
        answers=None if answer_B is None else answer_B.reshape(-1, n),
        valid=valid_B.reshape(-1, n),
    )
    return mean_scale(objective, n) * advantage_Pn.reshape(-1)


def objective_metric(
    objective: Objective,
    reward_B: NDArray[np.float64],
    answer_B: NDArray[np.int64] | None,
    valid_B: NDArray[np.bool_],
    n: int,
) -> dict[str, float]:
    """The objective's estimate, mean over groups with enough valid samples; empty for objectives without k."""
    if not isinstance(objective, ObjectiveWithK):
        return {}
    terms = ((objective.k, 1.0),) if isinstance(objective, PassAtKAnalytic) else objective.terms
    groups = [start + np.flatnonzero(valid_B[start : start + n]) for start in range(0, len(reward_B), n)]
    groups = [rows for rows in groups if len(rows) >= terms[-1][0]]
    if not groups or (isinstance(objective, MajAtK) and answer_B is None):
        return {}

    def value(rows: NDArray[np.int64], k: int) -> NDArray[np.float64]:
        if isinstance(objective, MajAtK) and answer_B is not None:
            return maj_at_k(answer_B[rows], reward_B[rows], k)
        return max_at_k(reward_B[rows], k)

    name = "maj" if isinstance(objective, MajAtK) else "max"
    which = "weights" if objective.k is None else str(objective.k)
    return {f"{name}_at_{which}": float(np.mean([mean_over(terms, partial(value, rows)) for rows in groups]))}
