"""Checkpointed layers give the same gradients with far less memory, for several types of model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.policy import checkpoint_layers
from tests.unit.learner.conftest import tiny_lm
from volley.errors import JobError
from volley.job import JOB, RLJob
from volley.update import LearnerSpec

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "opt": {"ffn_dim": 48, "dropout": 0.3, "attention_dropout": 0.3, "word_embed_proj_dim": 32},
    "gpt_neox": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
}


def pass_through(lm: Any) -> tuple[dict[str, Tensor], int]:
    """Gradients of an arbitrary loss, and the bytes that the forward pass kept for them, without parameters."""
    weights = {parameter.data_ptr() for parameter in lm.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids_RL = torch.arange(1, 31).reshape(2, 15)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_RLH = lm.base_model(input_ids=ids_RL, use_cache=False).last_hidden_state
    held = sum(kept.values())
    torch.autograd.backward((hidden_RLH * torch.linspace(-1, 1, hidden_RLH.shape[-1])).square().sum())
    return {name: each.grad for name, each in lm.named_parameters() if each.grad is not None}, held


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_bitwise_equal_and_use_little_memory(kind: str) -> None:
    """This includes models whose layers have dropout, which is off in training either way."""
    plain, held = pass_through(tiny_lm(kind, **KINDS[kind]))
    lm = tiny_lm(kind, **KINDS[kind])
    checkpoint_layers(lm)
    assert not lm.training
    again, held_again = pass_through(lm)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert held_again < held / 3


def test_a_model_without_checkpointable_layers_is_rejected() -> None:
    class Bare(nn.Module):
        config = type("Config", (), {"model_type": "bare"})

    with pytest.raises(JobError, match=r"models of type bare .* drop learner\.gradient_checkpointing"):
        checkpoint_layers(Bare())


def test_flash_attention_on_cpu_is_rejected_in_the_job() -> None:
    with pytest.raises(ValueError, match="gpus_per_rank: 1, or attention: sdpa"):
        LearnerSpec(attention="flash_attention_2")
    assert LearnerSpec(attention="flash_attention_2", gpus_per_rank=1).attention == "flash_attention_2"


def test_flash_attention_needs_bfloat16() -> None:
    job = {
        "kind": "rl",
        "name": "a",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "scorer": {"kind": "math"},
        "steps": 1,
        "objective": {"kind": "max_at_k", "k": 2},
        "learner": {"attention": "flash_attention_2", "gpus_per_rank": 1},
    }
    with pytest.raises(ValueError, match=r"model\.dtype: bfloat16"):
        JOB.validate_python(job)
    assert isinstance(JOB.validate_python({**job, "model": {"path": "m", "dtype": "bfloat16"}}), RLJob)
