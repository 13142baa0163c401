"""Linear layers with oneDNN give the same values and gradients as torch's own."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from learner import linear

SIZES = ((7, 5), (5, 7))  # more inputs than outputs, and fewer inputs


@pytest.fixture(autouse=True)
def _on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)


def both(inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    own = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    quick = copy.deepcopy(own)
    linear.speed_up(nn.Sequential(quick))
    return own, quick


def values_and_gradients(layer: nn.Linear, input_TI: Tensor) -> list[Tensor]:
    leaf_TI = input_TI.clone().requires_grad_()
    out_TO = layer(leaf_TI)
    weights = torch.linspace(-1, 1, out_TO.numel(), dtype=out_TO.dtype).reshape(out_TO.shape)
    return [out_TO, *torch.autograd.grad((weights * out_TO).sum(), [leaf_TI, *layer.parameters()])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (4,), (2, 3), (0,)])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_values_and_gradients_are_those_of_a_plain_layer(
    inputs: int, outputs: int, rows: tuple[int, ...], bias: bool
) -> None:
    own, quick = both(inputs, outputs, bias=bias)
    assert type(quick) is linear.OneDNNLinear
    input_TI = torch.randn(*rows, inputs, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(values_and_gradients(quick, input_TI), values_and_gradients(own, input_TI))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_use_the_plain_layer(dtype: torch.dtype) -> None:
    own, quick = both(7, 5, bias=True, dtype=dtype)
    input_TI = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(quick(input_TI), own(input_TI))


def test_matrices_may_have_any_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    left_IT, right_IO = torch.randn(7, 4, generator=generator), torch.randn(7, 5, generator=generator)
    torch.testing.assert_close(linear.product(left_IT.t(), right_IO.t()), left_IT.t() @ right_IO)


def test_layers_of_another_class_are_not_replaced() -> None:
    class Other(nn.Linear):
        """A layer with its own forward pass."""

    model = nn.Sequential(Other(7, 5), nn.Linear(5, 7))
    linear.speed_up(model)
    assert [type(layer) for layer in model] == [Other, linear.OneDNNLinear]


STEPS = """
import random, re
import torch
from pathlib import Path
from torch import nn
from learner import linear

def resident() -> float:
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

torch.set_num_threads(1)
linear.onednn_is_faster = lambda: True
model = nn.Sequential(nn.Linear(256, 768), nn.Linear(768, 256))
linear.speed_up(model)
lengths = random.Random(0)
for step in range(100):
    if step == 20:
        before = resident()
    model(torch.randn(lengths.randint(500, 4000), 256)).sum().backward()
print(resident() - before)
"""


def test_memory_does_not_grow_with_new_shapes() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 100  # MiB; oneDNN's own caches would take hundreds
