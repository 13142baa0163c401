"""The GPU page shows the calculator's results for the shipped jobs, and the calculator agrees with real models."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.sizing import GIB, SHAPES, Sizing, page, shape_of, size
from volley.job import JOB, ModelSpec, RLJob
from volley.lora import LoraSpec

JOBS = sorted(Path("deploy/jobs").glob("*.yaml"))
GPUS = {"gpu-1": 1, "gpu-8": 8, "gpu-64": 64}


def load(path: Path, **changes: Any) -> RLJob:
    job = JOB.validate_python({**yaml.safe_load(path.read_text()), **changes})
    assert isinstance(job, RLJob)
    return job


def sized(job: RLJob, **changes: Any) -> Sizing:
    options = {"gpu_bytes": 80 * GIB, "nic_gbit": 100, "prompt_tokens": 512, **changes}
    return size(job, shape_of(job.model.path), **options)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_shipped_job_fits_and_uses_the_gpus_it_is_named_for(path: Path) -> None:
    job = load(path)
    assert sized(job).fits
    used = job.actors.count * job.actors.gpus + job.learner.ranks * job.learner.gpus_per_rank
    assert used == pytest.approx(GPUS[path.stem])
    assert job.actors.gpus == job.actors.engine.get("tensor_parallel_size", job.actors.gpus)


def test_the_page_shows_what_the_calculator_prints() -> None:
    paths = [Path("deploy/jobs", f"{name}.yaml") for name in GPUS]
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.sizing", *map(str, paths)], capture_output=True, text=True, check=True
    ).stdout
    assert printed == page([(job, sized(job)) for job in map(load, paths)], 80, 100) + "\n"
    assert printed.strip() in Path("docs/gpu.md").read_text()


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen2.5-1.5b", 1.543714304), ("qwen2.5-7b", 7.615616512), ("qwen2.5-32b", 32.763876352)]
)
def test_parameters_of_published_models(name: str, billions: float) -> None:
    assert shape_of(Path(name)).parameters == round(billions * 1e9)
    assert (SHAPES / f"{name}.json").exists()


def test_parameter_counts_equal_those_of_a_real_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attention_bias=False,
    )
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    shape = shape_of(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.kv_bytes == 2 * 3 * 2 * (32 // 4) * 2


def test_the_arithmetic_of_one_job() -> None:
    job, shape = load(Path("deploy/jobs/gpu-8.yaml")), shape_of(Path("qwen2.5-7b"))
    made = sized(job)
    assert made.state == shape.parameters * 18 / 4
    assert made.activations == 4096 * shape.activation_bytes(2)
    assert made.reference == shape.parameters * 2 / 4
    assert made.rank == made.state + made.reference + made.activations + 5 * GIB
    assert made.cache == pytest.approx(0.9 * 80 * GIB - 2 * shape.parameters - 5 * GIB)
    assert (made.slots, made.samples_in_flight) == (128, 2048)
    assert made.broadcast_rounds == 3  # to 4 actors: 1, 2, 4 copies after each round
    assert made.broadcast_seconds == pytest.approx(2 * shape.parameters * (2 / 20e9 + 3 / 8.75e9))


def test_with_adapters_frozen_weights_have_no_optimizer_state(tmp_path: Path) -> None:
    from learner.lora import published
    from learner.policy import load_trained
    from tests.models import tiny_llama

    for targets in ("all-linear", ("q_proj", "down_proj")):
        lora = LoraSpec(rank=4, target_modules=targets)
        model = ModelSpec(path=tiny_llama(tmp_path / "tiny", head_dim=16), lora=lora)
        made = sum(each.numel() for _, each in published(load_trained(model, seed=0)))
        assert shape_of(model.path).adapters(lora) == made
    job, shape = load(Path("deploy/jobs/gpu-8.yaml")), shape_of(Path("qwen2.5-7b"))
    adapted = job.model_copy(update={"model": job.model.model_copy(update={"lora": LoraSpec()})})
    parameters = shape.adapters(LoraSpec())
    made_of_it = sized(adapted)
    assert parameters < shape.parameters / 100
    assert made_of_it.state == (2 * shape.parameters + 18 * parameters) / 4
    assert (made_of_it.reference, made_of_it.published) == (0.0, 2 * parameters)


def test_a_job_that_does_not_fit_is_reported() -> None:
    job = load(Path("deploy/jobs/gpu-8.yaml"))
    assert not sized(job, gpu_bytes=40 * GIB).fits
    assert not sized(job.model_copy(update={"learner": job.learner.model_copy(update={"ranks": 1})})).fits
    learner = load(Path("deploy/jobs/gpu-64.yaml")).learner.model_copy(update={"gradient_checkpointing": False})
    assert not sized(load(Path("deploy/jobs/gpu-64.yaml")).model_copy(update={"learner": learner})).fits
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.sizing", "deploy/jobs/gpu-64.yaml", "--gpu-gib", "30"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "| fits GPUs of 30 GiB | no |" in run.stdout


def test_offloaded_states_are_not_counted_on_the_gpu() -> None:
    job, shape = load(Path("deploy/jobs/gpu-8.yaml")), shape_of(Path("qwen2.5-7b"))
    device = {"device": "cpu"}
    zero = {"zero_optimization": {"offload_optimizer": device}}
    offloading = job.model_copy(update={"learner": job.learner.model_copy(update={"deepspeed": zero})})
    made = sized(offloading)
    assert (made.state, made.host) == (shape.parameters * 2 / 4, shape.parameters * 16 / 4)
    assert "| learner: states on the host, per rank | 28.4 GiB |" in page([(offloading, made)], 80, 100)
    assert sized(job).host == 0.0
