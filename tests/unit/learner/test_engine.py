"""The parameter groups and settings that the engine passes to AdamW and DeepSpeed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config import LearnerConfig
from learner.engine import decay_groups, deepspeed_config
from tests.unit.learner.conftest import tiny_lm
from volley.job import JOB, RLJob, SFTJob
from volley.model import ModelSpec
from volley.update import LearnerSpec, Optimizer, PolicyOptimizer


def test_weight_decay_moves_matrices_and_leaves_norms_and_biases_alone() -> None:
    lm = tiny_lm("qwen2")  # its attention has biases
    torch.nn.init.ones_(lm.model.layers[0].self_attn.q_proj.bias)  # biases start at 0, where decay would have no effect
    before = {name: each.detach().clone() for name, each in lm.named_parameters()}
    adam = torch.optim.AdamW(decay_groups(lm, 0.1), lr=0.01)
    for parameter in lm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    still = {name for name, each in lm.named_parameters() if torch.equal(each, before[name])}
    assert still == {name for name in before if "norm" in name or name.endswith("bias")}
    assert any("norm" in name for name in still)
    for name in before.keys() - still:
        torch.testing.assert_close(lm.get_parameter(name).detach(), before[name] * (1 - 0.01 * 0.1))


def test_a_sharded_parameter_is_classified_by_its_full_shape() -> None:
    """Under ZeRO-3 a parameter is a flat shard; its full shape is in another attribute."""
    matrix, vector = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(0))
    matrix.ds_shape, vector.ds_shape = torch.Size([4, 2]), torch.Size([4])  # type: ignore[attr-defined]
    model = torch.nn.ParameterList([matrix, vector])
    groups = decay_groups(model, 0.1)
    assert [[id(each) for each in group["params"]] for group in groups] == [[id(matrix)], [id(vector)]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_frozen_parameters_are_in_no_group_and_no_group_is_empty(weight_decay: float) -> None:
    lm = tiny_lm().requires_grad_(False)
    lm.lm_head.requires_grad_(True)
    (group,) = decay_groups(lm, weight_decay)
    assert group["params"] == [lm.lm_head.weight]
    assert group["weight_decay"] == weight_decay


def test_clipping_is_counted_where_the_norm_is_over_the_limit() -> None:
    assert [Optimizer(clip_norm=2.0).clips(norm) for norm in (1.9, 2.0, 2.1)] == [False, False, True]
    assert not Optimizer(clip_norm=None).clips(1e9)


@pytest.mark.parametrize(("clip_norm", "limit"), [(None, 0.0), (2.5, 2.5)])
def test_deepspeed_clips_where_the_job_says_and_nowhere_else(
    tmp_path: Path, clip_norm: float | None, limit: float
) -> None:
    """DeepSpeed clips at 1 unless it is told a limit; 0 is none."""
    settings = deepspeed_config(config_of(tmp_path, optimizer=PolicyOptimizer(clip_norm=clip_norm)))
    assert settings["gradient_clipping"] == limit


def test_reinforcement_is_not_clipped_by_default_and_supervised_steps_are() -> None:
    job = {"model": {"path": "m"}, "data": {"path": "d"}, "name": "n", "steps": 1}
    reinforced = JOB.validate_python({**job, "kind": "rl", "scorer": {"kind": "exact"}, "objective": {"kind": "mean"}})
    assert isinstance(reinforced, RLJob)
    assert reinforced.optimizer.clip_norm is None
    supervised = JOB.validate_python({**job, "kind": "sft"})
    assert isinstance(supervised, SFTJob)
    assert supervised.optimizer.clip_norm == 1.0
    with pytest.raises(ValueError, match=r"gradient_clipping .* write optimizer\.clip_norm"):
        LearnerSpec(deepspeed={"gradient_clipping": 1.0})


@pytest.mark.parametrize(("dtype", "narrow"), [("float32", False), ("bfloat16", True)])
def test_gradients_of_bfloat16_models_are_added_up_in_float32(tmp_path: Path, dtype: str, narrow: bool) -> None:
    """Over micro-batches, and over ranks: the sum of bfloat16 gradients would be rounded once per rank."""
    settings = deepspeed_config(config_of(tmp_path, dtype))
    assert settings["prescale_gradients"] is False
    assert settings.get("communication_data_type") == ("fp32" if narrow else None)
    assert settings.get("data_types") == ({"grad_accum_dtype": "fp32"} if narrow else None)


def config_of(folder: Path, dtype: Any = "float32", optimizer: Optimizer | None = None) -> LearnerConfig:
    return LearnerConfig(
        model=ModelSpec(path=folder, dtype=dtype),
        learner=LearnerSpec(deepspeed={"prescale_gradients": False}),
        optimizer=optimizer or Optimizer(),
        steps=1,
        seed=0,
        log_dir=folder,
    )
