"""Sums and maxima collected on the device during a step, then reduced over all ranks in one collective each."""

import torch
import torch.distributed as dist
from torch import Tensor


class Sums:
    """Named sums and maxima. Every rank must use the same names.

    Args:
        copies: how many ranks add each value: those of a sequence group all add the same.

    Values stay on the device until `total`, so that adding them never synchronises with it.
    """

    def __init__(self, device: torch.device, copies: int = 1) -> None:
        self.device, self.copies = device, copies
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}

    def add(self, **values: Tensor | float) -> None:
        """Add to the named sums."""
        for name, value in values.items():
            term = self._wide(value)
            self._sums[name] = self._sums[name] + term if name in self._sums else term

    def peak(self, **values: Tensor) -> None:
        """Update the named maxima, which start at 0; an empty tensor changes nothing."""
        for name, value in values.items():
            top = self._wide(value.max() if value.numel() else 0.0)
            self._peaks[name] = torch.maximum(self._peaks[name], top) if name in self._peaks else top.clamp(min=0)

    def total(self) -> dict[str, float]:
        """All sums and maxima, over all ranks."""
        return {
            **{name: value / self.copies for name, value in _reduced(self._sums, dist.ReduceOp.SUM).items()},
            **_reduced(self._peaks, dist.ReduceOp.MAX),
        }

    def _wide(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, torch.float64)
        return torch.tensor(value, dtype=torch.float64, device=self.device)


def _reduced(values: dict[str, Tensor], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
    names = sorted(values)
    if not names:
        return {}
    tensor = torch.stack([values[name] for name in names])
    dist.all_reduce(tensor, op=operation)
    return dict(zip(names, tensor.tolist(), strict=True))
