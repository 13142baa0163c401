"""Sums and peaks gathered during a step and then over all ranks, in one collective each."""

import torch
import torch.distributed as dist
from torch import Tensor


class Sums:
    """Named sums and maxima; every rank must use the same names."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}

    def add(self, **values: Tensor | float) -> None:
        """Add to the named sums."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value.detach() if isinstance(value, Tensor) else value)

    def peak(self, **values: Tensor) -> None:
        """Raise the named maxima; an empty tensor raises nothing."""
        for name, value in values.items():
            top = float(value.max()) if value.numel() else 0.0
            self._peaks[name] = max(self._peaks.get(name, 0.0), top)

    def total(self, only: tuple[str, ...] | None = None) -> dict[str, float]:
        """The figures over all ranks; a name nobody gave is 0."""
        sums = _reduced({name: self._sums[name] for name in only} if only else self._sums, dist.ReduceOp.SUM)
        peaks = {} if only else _reduced(self._peaks, dist.ReduceOp.MAX)
        return _Zeroed({**sums, **peaks})


class _Zeroed(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return 0.0


def _reduced(values: dict[str, float], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
    names = sorted(values)
    if not names:
        return {}
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64)
    if dist.get_backend() == "nccl":
        tensor = tensor.cuda()
    dist.all_reduce(tensor, op=operation)
    return dict(zip(names, tensor.tolist(), strict=True))
