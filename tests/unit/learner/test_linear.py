"""Products by oneDNN: the same values and gradients as torch's own, wherever a layer may be asked."""

import copy

import pytest
import torch
from torch import Tensor, nn

from learner import linear

I, O = 7, 5  # noqa: E741 - the shape suffixes


@pytest.fixture(autouse=True)
def _on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)


def both(*, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    own = nn.Linear(I, O, bias=bias, dtype=dtype)
    quick = copy.deepcopy(own)
    linear.speed_up(nn.Sequential(quick))
    return own, quick


def values_and_gradients(layer: nn.Linear, input_TI: Tensor) -> list[Tensor]:
    leaf_TI = input_TI.clone().requires_grad_()
    out_TO = layer(leaf_TI)
    weights = torch.linspace(-1, 1, out_TO.numel(), dtype=out_TO.dtype).reshape(out_TO.shape)
    return [out_TO, *torch.autograd.grad((weights * out_TO).sum(), [leaf_TI, *layer.parameters()])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(I,), (1, I), (4, I), (2, 3, I), (0, I)])
def test_values_and_gradients_are_those_of_a_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    own, quick = both(bias=bias)
    assert type(quick) is linear.OneDNNLinear
    input_TI = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(values_and_gradients(quick, input_TI), values_and_gradients(own, input_TI))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_the_plain_way(dtype: torch.dtype) -> None:
    own, quick = both(bias=True, dtype=dtype)
    input_TI = torch.randn(4, I, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(quick(input_TI), own(input_TI))


def test_a_product_takes_matrices_as_they_are_strided() -> None:
    generator = torch.Generator().manual_seed(0)
    left_IT, right_IO = torch.randn(I, 4, generator=generator), torch.randn(I, O, generator=generator)
    torch.testing.assert_close(linear.product(left_IT.t(), right_IO.t()), left_IT.t() @ right_IO)


def test_layers_of_another_class_keep_it() -> None:
    class Other(nn.Linear):
        """A layer that does something of its own."""

    model = nn.Sequential(Other(I, O), nn.Linear(O, I))
    linear.speed_up(model)
    assert [type(layer) for layer in model] == [Other, linear.OneDNNLinear]
