"""A plan: everything that is predicted of one job on given hardware."""

import math
from dataclasses import dataclass

from volley.errors import JobError
from volley.job import RLJob
from volley.plan.checks import check_devices, check_engine, check_formulas
from volley.plan.machine import Hardware
from volley.plan.memory import Memory, gpus_of, memory_of
from volley.plan.split import Split, apart_text, best_split
from volley.plan.stages import Load, Stages, samples_per_step, stages_of
from volley.shape import Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """What is predicted of ``job``.

    Attributes:
        split: the numbers of actors and ranks that suit the hardware best; None without GPUs, or if none fits.
    """

    job: RLJob
    shape: Shape
    hardware: Hardware
    load: Load
    memory: Memory
    stages: Stages
    split: Split | None

    @property
    def fits(self) -> bool:
        return not self.memory.problems

    @property
    def samples_per_second(self) -> float:
        return samples_per_step(self.job) / self.stages.step


def make_plan(job: RLJob, shape: Shape, hardware: Hardware, load: Load) -> Plan:
    """Predict what ``job`` needs and how fast it runs.

    Raises:
        JobError: the formulas do not cover the job, or it does not suit this machine.
    """
    check_formulas(job)
    check_engine(job, shape)
    check_devices(job, hardware)
    split = best_split(job, shape, hardware, load)
    _check_number(job, hardware, split)
    memory = memory_of(job, shape, hardware, load.prompt)
    return Plan(job, shape, hardware, load, memory, stages_of(job, shape, hardware, memory, load), split)


def plan_of_change(plan: Plan, job: RLJob) -> Plan:
    """``plan`` with another job; its split is left as it is."""
    memory = memory_of(job, plan.shape, plan.hardware, plan.load.prompt)
    stages = stages_of(job, plan.shape, plan.hardware, memory, plan.load)
    return Plan(job, plan.shape, plan.hardware, plan.load, memory, stages, plan.split)


def _check_number(job: RLJob, hardware: Hardware, split: Split | None) -> None:
    used = gpus_of(job)
    if used <= hardware.gpus + 1e-9:
        return
    advice = "no split of that number fits"
    if split is not None:
        advice = f"set actors.count={split.actors} and learner.ranks={split.ranks}"
        advice += apart_text(job)
    elif hardware.gpus == 1 and math.isclose(job.actors.gpus + job.learner.gpus_per_rank, 2):
        advice = "to share one GPU, set actors.gpus=0.4 and learner.gpus_per_rank=0.6"
    raise JobError(
        f"the job needs {used:g} GPUs ({job.actors.count} actors with {job.actors.gpus:g}, {job.learner.ranks} ranks "
        f"with {job.learner.gpus_per_rank:g}) and there are {hardware.gpus}: {advice}"
    )
