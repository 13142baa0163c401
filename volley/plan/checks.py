"""What the planner refuses: jobs that its formulas do not cover, and machines that do not suit the job."""

import math
from collections.abc import Mapping

from volley.errors import JobError
from volley.job import RLJob
from volley.plan.machine import Hardware
from volley.shape import Shape


def check_formulas(job: RLJob) -> None:
    """Raise `JobError` if the formulas leave out what the job asks for."""
    if job.update.value_model is not None:
        raise JobError(
            "there are no formulas for update.value_model, a second model with gradients and moments of its own: plan "
            "with --set update.value_model=null, and leave room for it"
        )
    if (size := job.learner.sequence_parallel) > 1:
        raise JobError(
            f"there are no formulas for learner.sequence_parallel: {size}, with which a rank keeps 1/{size} of a row's "
            "activations: plan with --set learner.sequence_parallel=1"
        )
    if (stages := job.actors.engine.get("pipeline_parallel_size", 1)) > 1:
        raise JobError(
            f"there are no formulas for pipeline_parallel_size: {stages}: plan with tensor_parallel_size in its place"
        )
    zero = job.learner.deepspeed.get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        value = zero.get(part) if isinstance(zero, Mapping) else zero
        if value and not (isinstance(value, Mapping) and value.get("device", "none") in ("cpu", "none")):
            raise JobError(
                f"learner.deepspeed.zero_optimization.{part} is {value!r}: the formulas know {{device: cpu}} only"
            )


def check_engine(job: RLJob, shape: Shape) -> None:
    """Raise `JobError` if vLLM would refuse this number of GPUs for the model, or this share of a GPU's memory."""
    gpus, share = max(1, math.ceil(job.actors.gpus)), job.actors.engine.get("gpu_memory_utilization", 1)
    if shape.num_attention_heads % gpus:
        raise JobError(
            f"actors.engine.tensor_parallel_size: {gpus} must divide the model's {shape.num_attention_heads} heads"
        )
    if isinstance(share, bool) or not (isinstance(share, int | float) and 0 < share <= 1):
        raise JobError(f"actors.engine.gpu_memory_utilization is {share!r}: write a number above 0, at most 1")


def check_devices(job: RLJob, hardware: Hardware) -> None:
    """Raise `JobError` if the job does not suit this kind of machine."""
    actor, rank = job.actors.gpus > 0, job.learner.gpus_per_rank > 0
    if actor != rank:
        raise JobError(
            "actors and learner ranks must both have GPUs or both have none: set actors.gpus and learner.gpus_per_rank"
        )
    if not actor and hardware.device.gpu:
        raise JobError(
            "the job uses no GPUs: describe the CPU with --machine FILE, which `python -m benchmarks.plan --machine "
            "FILE` writes, or set actors.gpus and learner.gpus_per_rank"
        )
    if actor and not hardware.device.gpu:
        raise JobError(
            f"the job uses GPUs and machine {hardware.device.name} is a CPU: pass --gpu NAME, or set actors.gpus and "
            "learner.gpus_per_rank to 0"
        )
