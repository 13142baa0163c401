"""The engine's interface without DeepSpeed: plain PyTorch and AdamW in one process, the reference for ZeRO-3."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.engine import learning_rate
from volley.update import Optimizer


@contextmanager
def process_group_of_one() -> Iterator[None]:
    """A process group of this process only, whose collectives return their input."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


class PlainEngine:
    """Stands in for `learner.engine.Engine` on one rank."""

    def __init__(self, module: nn.Module, spec: Optimizer, steps: int = 10) -> None:
        self.module: Any = module
        self.spec, self.steps, self.device = spec, steps, torch.device("cpu")
        self.copies = 1
        vectors = {name for name, _ in module.named_parameters() if name.endswith("bias") or "norm" in name}
        groups = [
            {
                "params": [each for name, each in module.named_parameters() if (name in vectors) == vector],
                "weight_decay": decay,
            }
            for vector, decay in ((False, spec.weight_decay), (True, 0.0))
        ]
        self.adam = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
        self.passes = 0

    def __call__(self, *inputs: Any, last: bool = False) -> Any:
        self.passes += 1
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients accumulated since the last update."""
        return {name: each.grad.clone() for name, each in self.module.named_parameters() if each.grad is not None}

    def update(self, step: int) -> tuple[float, float]:
        rate = learning_rate(self.spec, step, self.steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        limit = self.spec.clip_norm if self.spec.clip_norm is not None else float("inf")
        norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), limit))
        self.adam.step()
        self.adam.zero_grad()
        return norm, rate
