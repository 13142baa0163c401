"""The value model: one scalar per prompt, learned beside the policy.

Shapes: R rows (prompts), L row length, G the rank's groups, n samples of one group, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.attention import implementation
from learner.batch import as_many
from learner.compiled import compile_layers
from learner.config import LearnerConfig
from learner.engine import Engine
from learner.loss import value_loss
from learner.policy import load_trunk
from learner.sums import Sums
from volley.update import ValueModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PromptValue(nn.Module):
    """V(x): a linear map of the prompt's last hidden state in a model like the policy. It is 0 at the start."""

    def __init__(self, trunk: "PreTrainedModel") -> None:
        super().__init__()
        self.trunk = trunk
        first = next(trunk.parameters())
        self.head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, dtype=first.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids_RL: Tensor, last_R: Tensor) -> Tensor:
        """The value of each row, float32 [R]; ``last_R`` is the column of the prompt's last token."""
        hidden_RLH = self.trunk(input_ids=ids_RL, use_cache=False).last_hidden_state
        hidden_RH = hidden_RLH[torch.arange(len(ids_RL), device=ids_RL.device), last_R]
        wide = torch.promote_types(hidden_RH.dtype, torch.float32)
        # Not rounded to the model's type: near 1, bfloat16 values are 0.008 apart.
        value_R: Tensor = hidden_RH.to(wide) @ self.head.weight[0].to(wide) + self.head.bias.to(wide)
        return value_R


@dataclass(frozen=True, slots=True)
class Prompts:
    """A micro-batch of prompts.

    Attributes:
        ids_RL: int64 token ids, right-padded.
        last_R: int64, the column of each prompt's last token.
        group_R: the index of each prompt's group.
    """

    ids_RL: Tensor
    last_R: Tensor
    group_R: NDArray[np.int64]


class Critic:
    """A rank's value model under ZeRO-3, with its own optimiser. Every rank must make the same calls."""

    def __init__(self, config: LearnerConfig, spec: ValueModel) -> None:
        self.spec, self.budget = spec, config.micro_batch_tokens
        self.engine = Engine(
            lambda: PromptValue(_trunk(config)),
            config.optimizer.model_copy(update={"lr": spec.lr}),
            config,
        )

    def batches(self, prompts: Sequence[NDArray[np.int32]]) -> list[Prompts]:
        """The prompts in micro-batches, longest first; every rank gets the same number of batches."""
        return as_many(prompt_rows(prompts, self.budget), _no_prompts, self.engine.device)

    @torch.no_grad()
    def values(self, batches: Sequence[Prompts], groups: int) -> NDArray[np.float64]:
        """V of each of the rank's groups, float64 [G]."""
        out_G = np.zeros(groups)
        for batch in batches:
            out_G[batch.group_R] = self._forward(batch).double().cpu().numpy()[: len(batch.group_R)]
        return out_G

    def update(
        self,
        batches: Sequence[Prompts],
        *,
        old_G: NDArray[np.float64],
        target_Gn: NDArray[np.float64],
        keep_Gn: NDArray[np.bool_],
        step: int,
    ) -> dict[str, float]:
        """One step of the clipped value loss, a mean over all ranks' kept samples; returns metrics of all ranks."""
        sums = Sums(self.engine.device, self.engine.copies)
        sums.add(samples=float(keep_Gn.sum()))
        samples = max(sums.total()["samples"], 1.0)
        for batch in batches:
            value_R = self._forward(batch, last=batch is batches[-1])[: len(batch.group_R)]
            target_Rn, keep_Rn, old_R = (
                torch.from_numpy(each[batch.group_R]).to(value_R.device) for each in (target_Gn, keep_Gn, old_G)
            )
            target_Rn = torch.where(keep_Rn, target_Rn, 0.0).to(value_R.dtype)
            old_R1, value_R1 = old_R.to(value_R.dtype)[:, None], value_R[:, None]
            loss = (value_loss(value_R1, old_R1, target_Rn, self.spec.clip) * keep_Rn).sum() / samples
            self.engine.backward(loss / self.engine.copies)  # prompts are not split: each rank has the whole gradient
            sums.add(loss=loss, value=(value_R1 * keep_Rn).sum() / samples)
        grad_norm, _ = self.engine.update(step)
        total = sums.total()
        return {"value_loss": total["loss"], "value_mean": total["value"], "value_grad_norm": grad_norm}

    def _forward(self, batch: Prompts, *, last: bool = False) -> Tensor:
        value_R: Tensor = self.engine(
            batch.ids_RL.to(self.engine.device), batch.last_R.to(self.engine.device), last=last
        )
        return value_R


def _trunk(config: LearnerConfig) -> Any:
    spec = config.learner
    trunk = load_trunk(
        config.model.folder,
        config.model.dtype,
        attention=implementation(config),
        checkpointed=spec.gradient_checkpointing,
    )
    if spec.compile:
        compile_layers(trunk, cuda=spec.gpus_per_rank > 0)
    return trunk


def prompt_rows(prompts: Sequence[NDArray[np.int32]], budget: int) -> list[Prompts]:
    """The prompts as rows, longest first: micro-batches of at most ``budget`` padded tokens, or of one row.

    Empty prompts, of groups whose episodes made no call, are left out: their V is 0.
    """
    batches = []
    order = sorted((index for index, each in enumerate(prompts) if len(each)), key=lambda index: -len(prompts[index]))
    while order:
        rows = max(1, budget // len(prompts[order[0]]))
        taken, order = order[:rows], order[rows:]
        ids_RL = np.zeros((len(taken), len(prompts[taken[0]])), np.int64)
        for row, index in enumerate(taken):
            ids_RL[row, : len(prompts[index])] = prompts[index]
        last_R = np.array([len(prompts[index]) - 1 for index in taken])
        batches.append(Prompts(torch.from_numpy(ids_RL), torch.from_numpy(last_R), np.array(taken, np.int64)))
    return batches


def _no_prompts() -> Prompts:
    return Prompts(torch.zeros((1, 1), dtype=torch.int64), torch.zeros(1, dtype=torch.int64), np.zeros(0, np.int64))
