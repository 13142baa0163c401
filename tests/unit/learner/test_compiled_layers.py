"""Compiled layers compute what they did before: with adapters, checkpointed, on rows of any length, by oneDNN."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner import linear
from learner.compiled import compile_layers
from learner.lora import published, without_adapters
from learner.policy import checkpoint_layers, load_lm, load_trained
from tests.models import tiny_llama
from tests.unit.learner.conftest import tiny_lm
from volley.errors import JobError
from volley.lora import LoraSpec
from volley.model import ModelSpec
from volley.update import LearnerSpec

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of its own ways
LENGTHS = (15, 9, 22)  # of rows
ROUNDING = 3e-5  # as a share of a gradient: some sums are float32 in every model, and in another order here


@pytest.fixture(autouse=True)
def _counted() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def gradients(lm: Any, length: int) -> dict[str, Tensor]:
    """Gradients of an arbitrary loss."""
    lm.zero_grad()
    ids_RL = torch.arange(1, 1 + 2 * length).reshape(2, length) % 40
    hidden_RLH = lm.base_model(input_ids=ids_RL, use_cache=False).last_hidden_state
    torch.autograd.backward((hidden_RLH * torch.linspace(-1, 1, hidden_RLH.shape[-1])).square().sum())
    return {name: each.grad.clone() for name, each in lm.named_parameters() if each.grad is not None}


def assert_alike(lm: Any, other: Any) -> None:
    for length in LENGTHS:
        wanted, got = gradients(lm, length), gradients(other, length)
        assert wanted.keys() == got.keys()
        for name, each in wanted.items():
            assert (got[name] - each).norm() < ROUNDING * each.norm(), name


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_the_model(checkpointed: bool) -> None:
    lm = tiny_lm("llama")
    if checkpointed:
        checkpoint_layers(lm)
    compile_layers(lm, cuda=False)
    assert_alike(tiny_lm("llama"), lm)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert 0 < counters["stats"]["unique_graphs"] <= 2, "one for all layers and all lengths"


def test_adapters_are_trained_and_taken_away(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "model")
    plain, lm = (load_trained(ModelSpec(path=path, lora=LoraSpec(rank=4)), seed=1) for _ in range(2))
    compile_layers(lm, cuda=False)
    for each in (plain, lm):
        torch.manual_seed(2)
        for _, parameter in published(each):
            torch.nn.init.normal_(parameter, std=0.1)
    assert_alike(plain, lm)
    ids_RL = torch.arange(3, 20)[None]
    with torch.no_grad(), without_adapters(lm):
        own = lm(input_ids=ids_RL).logits
    torch.testing.assert_close(own, load_lm(path, "float32")(input_ids=ids_RL).logits, rtol=1e-4, atol=1e-5)


def test_products_by_onednn_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)
    lm = tiny_lm("llama").float()
    linear.speed_up(lm)
    compile_layers(lm, cuda=False)
    assert_alike(tiny_lm("llama").float(), lm)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_what_cannot_be_compiled_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(nn.Module):
        config = type("Config", (), {"model_type": "bare"})

    with pytest.raises(JobError, match=r"models of type bare .* write learner\.compile: false"):
        compile_layers(Bare(), cuda=False)
    for compiler in ("no-such-compiler -O2", ""):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(JobError, match=r"install g\+\+, or write compile: false"):
            compile_layers(tiny_lm("llama"), cuda=False)
    with pytest.raises(ValueError, match="write compile: false, or sequence_parallel: 1"):
        LearnerSpec(compile=True, ranks=2, sequence_parallel=2)
