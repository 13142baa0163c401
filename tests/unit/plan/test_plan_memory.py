"""Memory of a plan: the shipped jobs fit, parameters are those of real models, what does not fit is named."""

import json
from pathlib import Path

import pytest

from tests.unit.plan.plans import GPUS, JOBS, changed, planned, shape_for, shipped
from volley.errors import JobError
from volley.lora import LoraSpec
from volley.model import ModelSpec
from volley.plan.machine import GIB
from volley.plan.memory import gpus_of, shape_of
from volley.shape import Shape

OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_job_fits_and_uses_the_gpus_it_is_named_for(path: Path) -> None:
    job = shipped(path.stem)
    assert planned(job).fits
    assert gpus_of(job) == pytest.approx(GPUS[path.stem])
    assert job.actors.gpus == job.actors.engine.get("tensor_parallel_size", job.actors.gpus)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen2.5-1.5b", 1.543714304), ("qwen2.5-7b", 7.615616512), ("qwen2.5-32b", 32.763876352)]
)
def test_parameters_of_published_models(name: str, billions: float) -> None:
    assert shape_of(ModelSpec(path=Path("elsewhere") / name), JOBS).parameters == round(billions * 1e9)
    assert shape_of(ModelSpec(hub=f"Qwen/{name.upper()}"), JOBS).parameters == round(billions * 1e9)


@pytest.mark.parametrize("head_dim", [8, 32])
def test_parameter_counts_equal_those_of_a_real_model(tmp_path: Path, head_dim: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=False,
        attention_bias=False,
    )
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    shape = shape_of(ModelSpec(path=tmp_path), tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters == sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert shape.head_parameters == model.lm_head.weight.numel()
    assert shape.kv_bytes == 2 * 3 * 2 * head_dim * 2


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_adapters_are_counted_as_the_learner_makes_them(tmp_path: Path, targets: str | tuple[str, ...]) -> None:
    from learner.lora import published
    from learner.policy import load_trained
    from tests.models import tiny_llama

    lora = LoraSpec.model_validate({"rank": 4, "target_modules": targets})
    model = ModelSpec(path=tiny_llama(tmp_path / "tiny", head_dim=32), lora=lora)
    made = sum(each.numel() for _, each in published(load_trained(model, seed=0)))
    assert shape_of(model, tmp_path).adapters(lora) == made


def test_the_arithmetic_of_one_job() -> None:
    job = shipped("gpu-8")
    shape, made = shape_for(job), planned(job).memory
    assert made.state == shape.parameters * 18 / 4
    assert made.activations == 4096 * shape.activation_bytes(2)
    assert made.reference == shape.parameters * 2 / 4
    assert made.rank == made.state + made.reference + made.activations + 5 * GIB
    assert made.cache == pytest.approx(0.92 * 80 * GIB - 2 * shape.parameters - 5 * GIB)
    assert made.actor == pytest.approx(0.92 * 80 * GIB)


def test_with_adapters_frozen_weights_have_no_optimizer_state() -> None:
    job = changed(shipped("gpu-8"), model__lora={})
    shape, made = shape_for(job), planned(job).memory
    adapters = shape.adapters(LoraSpec())
    assert adapters < shape.parameters / 100
    assert made.state == (2 * shape.parameters + 18 * adapters) / 4
    assert (made.reference, made.published) == (0.0, 2 * adapters)


def test_offloaded_states_are_on_the_host() -> None:
    job = changed(shipped("gpu-8"), learner__deepspeed=OFFLOADED)
    parameters, made = shape_for(job).parameters, planned(job).memory
    assert (made.state, made.offloaded) == (parameters * 2 / 4, parameters * 16 / 4)
    assert made.host == parameters * 16 + 2 * 2 * parameters  # four ranks on one node, two versions
    assert planned(job, gpus_per_node=2).memory.host == parameters * 8 + 2 * 2 * parameters


def test_a_rank_has_what_an_actor_leaves_of_their_gpu() -> None:
    memory = planned(shipped("gpu-1")).memory
    assert memory.rank_room == pytest.approx(80 * GIB - memory.actor)


@pytest.mark.parametrize(("gpus", "copies"), [(1, 1), (2, 1), (4, 1), (28, 7)])
def test_each_gpu_of_an_engine_keeps_a_key_value_head(gpus: int, copies: int) -> None:
    """The model has 28 query heads and 4 key-value heads."""
    job = changed(shipped("gpu-8"), actors__count=1, actors__gpus=gpus, actors__engine={"tensor_parallel_size": gpus})
    memory = planned(job).memory
    assert memory.cache_tokens == pytest.approx(memory.cache / copies / (2 * 28 * 4 * 128 * 2), abs=1)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("gpu-8", {"learner__ranks": 1}, "a learner rank needs"),
        ("gpu-64", {"learner__gradient_checkpointing": False}, "a learner rank needs"),
        ("gpu-8", {"sampling__max_tokens": 2_000_000, "learner__gradient_checkpointing": True}, "cache holds"),
        ("gpu-1", {"actors__kv_cache_gb": 90}, "an actor needs"),
        ("gpu-1", {"actors__kv_cache_gb": 0.01}, "cache holds"),
    ],
)
def test_a_job_that_does_not_fit_is_reported(name: str, changes: dict[str, object], problem: str) -> None:
    assert problem in "; ".join(planned(changed(shipped(name), **changes)).memory.problems)


def test_a_host_is_checked_only_if_it_is_described() -> None:
    job = changed(shipped("gpu-8"), learner__deepspeed=OFFLOADED)
    assert planned(job).fits
    assert not planned(job, host_gib=64).fits
    assert planned(job, host_gib=512).fits


def test_a_model_is_read_from_its_folder_first(tmp_path: Path) -> None:
    config = json.loads((JOBS / "models" / "qwen2.5-7b.json").read_text())
    folder = tmp_path / "qwen2.5-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert shape_of(ModelSpec(path=folder), JOBS).num_hidden_layers == 3
    assert shape_of(ModelSpec(path=folder), JOBS, JOBS / "models" / "qwen2.5-7b.json").num_hidden_layers == 28


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a mapping"),
        ('{"hidden_size": 8}', "has no num_hidden_layers: the formulas are for decoders"),
        ('{"num_experts": 8}', "mixture of experts"),
        ('{"model_type": "gemma3"}', "model_type 'gemma3': the formulas are for llama"),
        (None, "No such file"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(JobError, match=message) as raised:
        shape_of(ModelSpec(path=Path("m")), tmp_path, file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("value", [0, -5, 3584.5, 1e30, 1 << 40, True, "big", None, [4], float("inf")])
@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"])
def test_an_impossible_size_is_named(tmp_path: Path, name: str, value: object) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads((JOBS / "models" / "qwen2.5-7b.json").read_text()), name: value}))
    with pytest.raises(JobError, match=rf"config.json: {name} is .*must be an integer from 1 to"):
        shape_of(ModelSpec(path=Path("m")), tmp_path, file)
    assert Shape.of(tmp_path) is None


def test_an_unknown_model_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"unknown has no config.json: pass the model's with --config FILE, or copy it"):
        shape_of(ModelSpec(path=Path("unknown")), tmp_path)
