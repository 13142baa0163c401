"""What a job may set of DeepSpeed, over the API and at all; bounds of a job's numbers."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.api.jobs import refusals
from services.api.problems import Problem
from services.api.routes.runs import check_changeable
from services.api.settings import ApiSettings
from services.state import Observed
from volley.job import RLJob, Sampling
from volley.update import LearnerSpec


def refused(options: dict[str, Any], **settings: Any) -> dict[str, str]:
    told = ApiSettings.model_validate({"redis_url": "x", **settings})
    return {each.pointer: each.detail for each in refusals({"learner": {"deepspeed": options}}, told)}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"torch_autocast": {"lower_precision_safe_modules": ["os.system"]}}, "torch_autocast"),
        ({"csv_monitor": {"enabled": True, "output_path": "/etc"}}, "csv_monitor"),
        ({"flops_profiler": {"output_file": "/etc/x"}}, "flops_profiler"),
        ({"checkpoint": {"writer": {}}}, "checkpoint"),
        ({"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/x"}}}, "offload_param/nvme_path"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer/device"),
        ({"zero_optimization": {"leaf_module": {"classes": ["os.X"]}}}, "zero_optimization/leaf_module"),
        ({"zero_optimization": {"overlap_comm": ["a"]}}, "zero_optimization/overlap_comm"),
        ({"bf16": "os.system"}, "bf16"),
        ({"gradient_clipping": {"a": 1}}, "gradient_clipping"),
    ],
)
def test_deepspeed_options_that_name_code_or_files_need_the_star(options: dict[str, Any], where: str) -> None:
    (pointer,) = refused(options)
    assert pointer.startswith("/job/learner/deepspeed/")
    assert pointer.endswith(where)
    assert refused(options, allow_code=["*"]) == {}


def test_numbers_and_known_names_are_taken() -> None:
    options = {
        "zero_optimization": {
            "overlap_comm": False,
            "stage3_max_live_parameters": 1e8,
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "communication_data_type": "fp32",
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None},
    }
    assert refused(options) == {}
    assert LearnerSpec(deepspeed=options).deepspeed == options


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"zero_optimization": {"stage": 2}}, "shards as stage 3"),
        ({"zero_optimization": True}, "is to be a mapping"),
        ({"train_batch_size": 8}, "write prompts_per_step"),
        ({"train_micro_batch_size_per_gpu": 8}, "tokens_per_micro_batch"),
        ({"gradient_accumulation_steps": 8}, "tokens_per_micro_batch"),
        ({"optimizer": {"type": "Adam"}}, "the job's own optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "optimizer.schedule"),
    ],
)
def test_what_the_learner_sets_itself_is_refused(options: dict[str, Any], instead: str) -> None:
    with pytest.raises(ValidationError, match=instead):
        LearnerSpec(deepspeed=options)
    assert LearnerSpec(deepspeed={"zero_optimization": {"stage": 3}})


@pytest.mark.parametrize(
    ("name", "most"), [("seed", 2**63 - 1), ("steps", 10**9), ("prompts_per_step", 10**6), ("max_lag", 10_000)]
)
def test_numbers_of_a_job_are_bounded(name: str, most: int) -> None:
    tree = {
        "name": "a",
        "model": {"path": "/m"},
        "data": {"path": "/d.jsonl"},
        "scorer": {"kind": "exact"},
        "steps": 1,
        "objective": {"kind": "mean"},
    }
    assert getattr(RLJob.model_validate({**tree, name: most}), name) == most
    with pytest.raises(ValidationError, match=f"(?s){name}.*less than or equal to {most}"):
        RLJob.model_validate({**tree, name: most + 1})
    with pytest.raises(ValidationError):
        Sampling(n=10**5 + 1)


def test_a_run_that_is_done_is_not_to_be_resumed() -> None:
    with pytest.raises(Problem, match="the run is done: it can not be changed any more"):
        check_changeable(Observed(updated=1.0, state="done"))
    with pytest.raises(Problem, match="resume it first"):
        check_changeable(Observed(updated=1.0, state="failed"))
    check_changeable(Observed(updated=1.0, state="running"))
