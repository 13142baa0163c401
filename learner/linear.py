"""Products of float32 matrices on CPUs: by oneDNN where torch's own leave half of the processor unused.

torch multiplies with MKL, which takes its AVX-512 kernels on Intel's processors only; oneDNN, which torch carries too,
takes them on every processor that has them: 2.2 times as fast on an AMD EPYC. The two add up in different orders.

Shapes: T tokens, I inputs, O outputs.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# What oneDNN and the layer above it make for a shape of a product is kept for so many shapes: enough for the layers of
# one micro-batch. With the default, 1024, the heap can not shrink between steps of ever other lengths: it grew by GBs.
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
SHAPES_KEPT = 16


class OneDNNLinear(nn.Linear):
    """A linear layer whose products, of the backward pass too, are `product`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name torch gives it
        if not by_onednn(input):
            return super().forward(input)
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def speed_up(model: nn.Module) -> None:
    """Let the linear layers of ``model`` multiply by oneDNN, where that is the faster way on this machine.

    To be called before this process has multiplied by oneDNN.
    """
    if onednn_is_faster():
        for variable in CACHES:
            os.environ.setdefault(variable, str(SHAPES_KEPT))
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDNNLinear


@cache
def onednn_is_faster() -> bool:
    """Has this processor AVX-512, and is it not Intel's?"""
    if not torch._C._has_mkldnn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def by_onednn(left: Tensor) -> bool:
    """Is a product with ``left`` taken by oneDNN?"""
    return left.device.type == "cpu" and left.dtype == torch.float32 and left.numel() > 0 and onednn_is_faster()


def product(left_TI: Tensor, right_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``left right' + bias`` of [..., I] and [O, I], in any strides, [..., O]; no gradient flows through it."""
    if not by_onednn(left_TI):
        return nn.functional.linear(left_TI, right_OI, bias_O)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left_TI, right_OI, bias_O, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(input_TI, weight_OI)
        return product(input_TI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grads
        input_TI, weight_OI = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        rows_TO = grad_TO.reshape(-1, grad_TO.shape[-1])
        rows_TI = input_TI.reshape(-1, input_TI.shape[-1])
        return (
            product(grad_TO, weight_OI.t()) if wanted[0] else None,
            _weight_gradient(rows_TO, rows_TI) if wanted[1] else None,
            rows_TO.sum(0) if wanted[2] else None,
        )


def _weight_gradient(grad_TO: Tensor, input_TI: Tensor) -> Tensor:
    """``grad' input``, [O, I]. oneDNN copies a left factor that is transposed: the narrower one is."""
    if grad_TO.shape[1] > input_TI.shape[1]:
        return product(input_TI.t(), grad_TO.t()).t()
    return product(grad_TO.t(), input_TI.t())
