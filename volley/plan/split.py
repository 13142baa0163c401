"""How many of the GPUs to give to actors and to learner ranks."""

from dataclasses import dataclass

from volley.base import replaced
from volley.job import RLJob
from volley.plan.machine import Hardware
from volley.plan.memory import memory_of, shares_gpu
from volley.plan.stages import Load, generate, publish, samples_per_step, score_seconds, step_seconds, train
from volley.shape import Shape


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of actors and learner ranks, each with the GPUs that the job gives to one.

    Attributes:
        gpus: GPUs of both.
        samples_per_second: predicted.
    """

    actors: int
    ranks: int
    gpus: float
    samples_per_second: float


def with_counts(job: RLJob, actors: int, ranks: int) -> RLJob:
    """``job`` with other numbers of actors and learner ranks. Raises ValidationError if that makes no valid job."""
    most = job.actors.max_count
    limits = {} if most is None or most >= actors else {"max_count": actors}
    counted = replaced(job.actors, count=actors, **limits)
    return replaced(job, actors=counted, learner=replaced(job.learner, ranks=ranks))


def apart(job: RLJob) -> RLJob:
    """``job`` with whole GPUs, one each, where an actor and a rank share one, and then no turns."""
    if not shares_gpu(job):
        return job
    engine = {name: value for name, value in job.actors.engine.items() if name != "gpu_memory_utilization"}
    actors = replaced(job.actors, gpus=1, engine=engine)
    learner = replaced(job.learner, gpus_per_rank=1)
    return replaced(job, actors=actors, learner=learner, placement="separate")


def apart_text(job: RLJob) -> str:
    """What `apart` changes, as an addition to other changes."""
    if not shares_gpu(job):
        return ""
    return ", each with one GPU" + (", and placement: separate" if job.placement == "colocated" else "")


def best_split(job: RLJob, shape: Shape, hardware: Hardware, load: Load) -> Split | None:
    """The split of at most ``hardware.gpus`` GPUs that makes the most samples per second; the smallest if several do.

    An actor and a rank that share a GPU are given one each. None if no split fits, or for a job without GPUs.
    """
    job = apart(job)
    per_actor, per_rank, gpus = job.actors.gpus, job.learner.gpus_per_rank, hardware.gpus
    if not (per_actor and per_rank):
        return None
    ranks = _rank_seconds(job, shape, hardware, load)
    score, splits = score_seconds(job, load), []
    for actors in range(1, int((gpus - per_rank) / per_actor + 1e-9) + 1):
        changed = with_counts(job, actors, 1)
        memory = memory_of(changed, shape, hardware, load.prompt)
        making = generate(changed, shape, hardware, memory, load).seconds
        for count, seconds in ranks:
            used = actors * per_actor + count * per_rank
            if used > gpus + 1e-9:
                break
            sent = publish(changed, shape, hardware, memory, used)
            step = step_seconds(job, making, score, seconds, sent)
            splits.append(Split(actors, count, used, samples_per_step(job) / step))
    return max(splits, key=lambda split: (split.samples_per_second, -split.gpus), default=None)


def _rank_seconds(job: RLJob, shape: Shape, hardware: Hardware, load: Load) -> list[tuple[int, float]]:
    """Numbers of ranks that fit, rising, each with the seconds of a step; those that gain nothing are left out."""
    found: list[tuple[int, float]] = []
    most = min(job.prompts_per_step, int((hardware.gpus - job.actors.gpus) / job.learner.gpus_per_rank + 1e-9))
    for ranks in range(1, most + 1):
        changed = with_counts(job, 1, ranks)
        memory = memory_of(changed, shape, hardware, load.prompt)
        seconds = train(changed, shape, hardware, memory, load).seconds
        if not memory.problems and (not found or seconds < found[-1][1]):
            found.append((ranks, seconds))
    return found
