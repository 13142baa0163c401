"""Jobs that few write: actors and learner that take turns, several turns of a sample, critics, chosen adapters."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.plans import changed, jobs, large, loads, planned, shape_for, shapes, shipped
from volley.errors import JobError
from volley.job import RLJob
from volley.lora import LoraSpec
from volley.plan.advice import advise
from volley.plan.machine import Device, Hardware
from volley.plan.memory import memory_of
from volley.plan.report import make_plan
from volley.plan.split import with_counts
from volley.plan.stages import Load
from volley.shape import Shape

CPU = Device(name="cpu", memory_gib=1e6, tflops=1, memory_gb_s=50, gpu=False)


def in_turns(job: RLJob, *, gpus: float) -> RLJob:
    """``job`` with one actor and one rank that take turns on one GPU, or on a CPU with ``gpus`` 0."""
    alone = with_counts(job, 1, 1)
    return changed(
        alone,
        placement="colocated",
        broadcast={},
        learner__deepspeed={},
        learner__gpus_per_rank=gpus,
        actors__gpus=gpus,
        actors__kv_cache_gb=1.0,
        actors__engine={},
    )


@given(jobs(), shapes(), loads(), st.sampled_from([0.0, 0.5]), st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_a_job_whose_roles_take_turns_has_a_plan_and_advice(
    job: RLJob, shape: Shape, load: Load, gpus: float, others: int
) -> None:
    job = in_turns(job, gpus=gpus)
    plan = make_plan(job, shape, large(gpus=others) if gpus else Hardware(device=CPU, gpus=1), load)
    stages = plan.stages
    assert stages.step >= stages.generation.seconds + stages.training.seconds
    assert advise(plan)
    if plan.split is not None:
        assert plan.split.gpus >= 2, "an actor and a rank with a GPU each"


def test_advice_to_end_the_turns_says_so() -> None:
    job = in_turns(shipped("gpu-1"), gpus=0.5)
    assert "each with one GPU, and placement: separate, raises" in advise(planned(job, gpus=2))


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({}, 512 + 100),
        ({"turns": {"max_count": 4, "observation": "{{ verdict.status }}", "max_observation_tokens": 50}}, 512 + 550),
        ({"rollout": {"kind": "program", "target": "a:b", "max_context": 2000}}, 2000),
        ({"rollout": {"kind": "program", "target": "a:b"}}, 512 + 100),
    ],
)
def test_a_row_has_room_for_all_that_a_sample_may_hold(changes: dict[str, Any], row: int) -> None:
    job = changed(shipped("gpu-8"), sampling__max_tokens=100, **changes)
    assert memory_of(job, shape_for(job), large(), 512).row_tokens == row


def test_a_value_model_has_no_formulas() -> None:
    job = changed(shipped("gpu-8"), objective={"kind": "mean"}, update__value_model={})
    with pytest.raises(JobError, match=r"--set update\.value_model=null"):
        planned(job)


def test_a_group_is_generated_by_one_actor() -> None:
    job = changed(shipped("gpu-8"), prompts_per_step=4, max_lag=0, sampling__n=16, learner__ranks=1)
    few, many = (planned(with_counts(job, count, 1)).stages.generation for count in (4, 8))
    assert few.seconds == many.seconds
    assert few.running == 16


def test_adapters_are_found_by_the_ends_of_names() -> None:
    shape = shape_for(shipped("gpu-8"))
    short, long = (shape.adapters(LoraSpec(target_modules=(name,))) for name in ("q_proj", "self_attn.q_proj"))
    assert short == long
    with pytest.raises(JobError, match="no 'router' in the formulas, only q_proj"):
        shape.adapters(LoraSpec(target_modules=("router",)))
