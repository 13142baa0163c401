"""A `Reinforcer` over plain PyTorch, batches for it, and the loss of a textbook."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.batch import Packer, RankBatch, rank_batch
from learner.policy import Policy
from learner.reinforce import Reinforcer
from tests.learner_batches import naive_logprobs, random_group, scored
from tests.plain_engine import PlainEngine
from volley.objectives import MaxAtK, Objective, advantages, parse_objective
from volley.records import Group
from volley.update import Optimizer, PolicyUpdate

REWARDS = ([1.0, 0.0, 0.3, 0.0], [0.0, 1.0, 1.0, 0.2], [0.5, 0.5, 0.5, 0.5])
STILL = Optimizer(lr=1e-30, clip_norm=None)
MAX2: Objective = MaxAtK(k=2)
SPECS: dict[str, dict[str, Any]] = {
    "default": {},
    "sequences": {"ratio": "sequence", "behaviour_correction": {"kind": "sequence", "cap": 1.5}},
    "everything": {
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.1, "estimator": "k3"},
        "entropy_bonus": 0.05,
        "behaviour_correction": {"kind": "token", "cap": 1.2, "mask": True},
    },
}


def groups_of(seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [random_group(rng, i) for i in range(3)]


def batch_of(groups: list[Group], spec: PolicyUpdate, valid: Any = None, version: int = 0) -> RankBatch:
    columns = [
        scored(group, rewards, valid_n=None if valid is None else valid[row])
        for row, (group, rewards) in enumerate(zip(groups, REWARDS, strict=True))
    ]
    return rank_batch(groups, columns, version=version, mask_truncated=spec.mask_truncated)


def reinforcer(
    lm: Any, spec: PolicyUpdate, *, reference: Any = None, budget: int = 1 << 20, shared: bool = True, **more: Any
) -> tuple[Reinforcer, "Recording"]:
    engine = Recording(Policy(lm, 1.0, entropy_gradient=spec.entropy_bonus > 0), more.pop("optimizer", STILL))
    pack = Packer(budget, 1 << 20 if shared else 1, shared, engine.device)
    other = None if reference is None else Policy(reference, 1.0)
    return Reinforcer(spec, engine, pack, reference=other, **more), engine  # type: ignore[arg-type]


class Recording(PlainEngine):
    """An engine that records the gradients of every update."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[dict[str, Tensor]] = []

    def update(self, step: int) -> tuple[float, float]:
        self.seen.append(self.gradients())
        return super().update(step)


def step(worker: Reinforcer, batch: RankBatch, objective: Any) -> tuple[dict[str, float], np.ndarray[Any, Any]]:
    metrics, by_id = worker.step(batch, parse_objective(objective), 0)
    return metrics, np.stack([by_id[group.group_id] for group in batch.groups])


def textbook_loss(lm: Any, reference: Any, groups: list[Group], spec: PolicyUpdate) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    samples = sum(g.n for g in groups)
    tokens = sum(len(g.tokens_T) for g in groups)
    for group, rewards in zip(groups, REWARDS, strict=True):
        advantage_n = advantages(np.array(rewards), MAX2)
        theta_T, entropy_T = naive_logprobs(lm, group)
        ref_T = naive_logprobs(reference, group)[0].detach()
        start = 0
        for advantage, length in zip(advantage_n, group.lengths_n, strict=True):
            part = slice(start, start + int(length))
            start += int(length)
            theta, mu = theta_T[part], torch.from_numpy(group.logprobs_T[part]).double()
            weight = torch.exp(theta.detach() - mu)
            if spec.behaviour_correction.kind == "sequence":
                weight = weight.prod().expand(int(length))
            over = weight > spec.behaviour_correction.cap  # type: ignore[union-attr]
            masked = spec.behaviour_correction.mask  # type: ignore[union-attr]
            weight = torch.where(over, 0.0 if masked else spec.behaviour_correction.cap, weight)  # type: ignore[union-attr]
            ratio = torch.exp(theta - theta.detach())
            term = weight * (ratio.prod() / length if spec.ratio == "sequence" else ratio) * advantage
            difference = theta - ref_T[part]
            term = term - spec.kl.coefficient * (torch.exp(-difference) - 1 + difference) / group.n
            term = term + spec.entropy_bonus * entropy_T[part] / group.n
            scale = samples / tokens if spec.aggregation == "token_mean" else 1.0
            loss = loss - scale * term.sum() / len(groups)
    return loss


def by_sample(group: Group, values_T: Any) -> list[Any]:
    """Values of a group's tokens, cut into its samples."""
    ends = np.cumsum(group.lengths_n)[:-1]
    return list(torch.tensor_split(values_T, torch.from_numpy(ends)))
