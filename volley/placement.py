"""Whether actors and learner have devices of their own, or take turns on the same ones."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from volley.job import RLJob

Placement = Literal["separate", "colocated"]


def check_placement(job: "RLJob") -> None:
    """Raise `ValueError` if the job's actors and learner cannot take turns; it names the change to make."""
    actors, learner = job.actors, job.learner
    if job.placement == "separate":
        if job.broadcast.transport == "shared_memory":
            raise ValueError(
                "broadcast.transport: shared_memory is for actors on the learner's devices: write placement: "
                "colocated, or broadcast: {transport: object_store}"
            )
        return
    if job.broadcast.transport == "collective":
        raise ValueError(
            "placement: colocated hands weights over on one host: write broadcast: {transport: shared_memory}, or "
            "{transport: object_store}"
        )
    if bool(actors.gpus) != bool(learner.gpus_per_rank):
        raise ValueError(
            "placement: colocated needs actors and learner on the same devices: give both a share of one GPU, such as "
            "actors.gpus: 0.5 and learner.gpus_per_rank: 0.5, or neither"
        )
    if actors.gpus and (max(actors.count, actors.max_count or 1, learner.ranks) > 1 or _shares(job) > 1 + 1e-9):
        raise ValueError(
            "placement: colocated shares one GPU between one actor and one rank: write actors.count: 1, "
            "learner.ranks: 1, and shares that add up to 1, such as actors.gpus: 0.5 and learner.gpus_per_rank: 0.5"
        )
    zero = learner.deepspeed.get("zero_optimization", {})
    if actors.gpus and (offloaded := [key for key in ("offload_optimizer", "offload_param") if zero.get(key)]):
        raise ValueError(
            f"placement: colocated moves the learner's state to the host by itself: remove {offloaded[0]} from "
            "learner.deepspeed"
        )


def _shares(job: "RLJob") -> float:
    return job.actors.gpus + job.learner.gpus_per_rank
