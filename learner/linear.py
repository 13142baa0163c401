"""Matrix products: oneDNN for float32 on CPUs where torch's default is slow, and float32 sums of narrower factors.

torch multiplies with MKL, which uses its AVX-512 kernels on Intel processors only. oneDNN, which torch also ships, uses
them on every processor that has AVX-512: 2.2 times as fast on an AMD EPYC. The two sum in different orders.

Shapes: T tokens, I inputs, O outputs.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# oneDNN and torch's layer above it cache what they build for each shape of product. 16 shapes are enough for the layers
# of one micro-batch; with the default of 1024 the heap grows by gigabytes, as every step has other lengths.
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
SHAPES_KEPT = 16


class OneDNNLinear(nn.Linear):
    """A linear layer that uses `product`, in the backward pass too."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name torch gives it
        if not by_onednn(input):
            return super().forward(input)
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def speed_up(model: nn.Module) -> None:
    """Make the linear layers of ``model`` use oneDNN if it is faster on this machine.

    Call it before this process first uses oneDNN.
    """
    if onednn_is_faster():
        for variable in CACHES:
            os.environ.setdefault(variable, str(SHAPES_KEPT))
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDNNLinear


@cache
def onednn_is_faster() -> bool:
    """Whether this processor has AVX-512 and is not an Intel one."""
    if not torch._C._has_mkldnn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def by_onednn(left: Tensor) -> bool:
    """Whether a product with ``left`` uses oneDNN."""
    return left.device.type == "cpu" and left.dtype == torch.float32 and left.numel() > 0 and onednn_is_faster()


def product(left_TI: Tensor, right_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``left right' + bias`` for [..., I] and [O, I] with any strides: [..., O]; no gradient flows through it."""
    if not by_onednn(left_TI):
        return nn.functional.linear(left_TI, right_OI, bias_O)
    multiply = _opaque if torch.compiler.is_compiling() else _by_onednn
    return multiply(left_TI, right_OI, bias_O)


def _by_onednn(left_TI: Tensor, right_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left_TI, right_OI, bias_O, "none", [], "")
    return out


# torch's compiler takes oneDNN's product for one of its own, whose weights are packed. It calls this one as it is.
_opaque = torch.library.custom_op("volley::product", _by_onednn, mutates_args=())


@_opaque.register_fake
def _shape(left_TI: Tensor, right_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return left_TI.new_empty((*left_TI.shape[:-1], right_OI.shape[0]))


def wide_factor(weight_OI: Tensor) -> Tensor:
    """``weight`` as `wide_product` needs it: CUDA multiplies bfloat16 into float32, a CPU needs float32 factors."""
    if weight_OI.device.type == "cuda" or torch.promote_types(weight_OI.dtype, torch.float32) == weight_OI.dtype:
        return weight_OI
    return weight_OI.float()


def wide_product(left_TI: Tensor, factor_OI: Tensor) -> Tensor:
    """``left factor'`` of two matrices of one type, summed and returned in float32 or wider; no gradient flows."""
    if _is_narrow(left_TI):
        return torch.mm(left_TI, factor_OI.t(), out_dtype=torch.float32)
    return product(left_TI, factor_OI)


def add_product(out_OI: Tensor, left_TO: Tensor, right_TI: Tensor) -> None:
    """Add ``left' right`` to ``out``, which is float32 or wider; ``right`` may be narrower than ``left``."""
    if right_TI.device.type == "cuda" and _is_narrow(right_TI):
        out_OI += torch.mm(left_TO.to(right_TI.dtype).t(), right_TI, out_dtype=torch.float32)
    else:
        out_OI.addmm_(left_TO.t(), right_TI.to(left_TO.dtype))


def _is_narrow(factor: Tensor) -> bool:
    return factor.dtype in (torch.bfloat16, torch.float16)


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
    """``grad' input``, [O, I]. oneDNN copies a transposed left factor, so the narrower factor takes that place."""
    if grad_TO.shape[1] > input_TI.shape[1]:
        return product(input_TI.t(), grad_TO.t()).t()
    return product(grad_TO.t(), input_TI.t())
