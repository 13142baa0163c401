"""The resources that a job needs, and whether the host has them."""

import json
import math
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.jobs.job_file import Job
from volley.base import replaced
from volley.errors import HostError, JobError
from volley.job import ActorsSpec, EvalJob, RFTJob, RLJob, SFTJob
from volley.memory import available_memory
from volley.plan.memory import ACTOR_BYTES, RANK_BYTES
from volley.shape import WIDTHS, Shape, micro_batch_tokens
from volley.state import Desired

Sampled = RLJob | RFTJob | EvalJob
Trained = RLJob | SFTJob | RFTJob

GIB = 1 << 30
# Measured resident memory of an idle process, without the model.
WORKER_BYTES = int(0.15 * GIB)
RAY_BYTES = int(0.7 * GIB)
STORE_BYTES = 256 << 20  # in Ray's object store beside the weights: prompts, samples and scores
UNSPILLED = 0.8  # of the object store; of a fuller one Ray copies objects to the disk
# Per parameter: weight, gradient, two moments, reference in float32; in bfloat16, with a float32 master copy, as many.
STATE_BYTES = 20
CRITIC_BYTES = 16  # the same of a value model, which has no reference
PROMPT_TOKENS = 512  # assumed, as the prompts are not read here
LOWER = "lower actors.count, actors.kv_cache_gb, learner.ranks or learner.tokens_per_micro_batch"
MOST_HEADER = 100 << 20  # bytes; the format's own limit


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources that a job reserves from Ray, and the memory its processes need on one host.

    Attributes:
        processes: what each process reserves, by Ray's resource name; processes that reserve nothing are left out.
        custom: the sum of each custom resource.
        actors: the job's actors, if it has any.
        largest_bytes: memory of the process that needs most of it.
    """

    cpus: float
    gpus: float
    memory_bytes: int
    object_store_bytes: int
    processes: tuple[Mapping[str, float], ...] = ()
    custom: Mapping[str, float] = field(default_factory=dict)
    actors: ActorsSpec | None = None
    largest_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bundle:
    """What each of ``count`` like processes reserves from one node, by Ray's resource name."""

    role: str
    amounts: tuple[tuple[str, float], ...]
    count: int


def needs_of(job: Job) -> Needs:
    """Return the most that ``job`` needs at any time; with its processes only if it has a single phase."""
    first, *others = phases_of(job)
    return _most(first, *others) if others else first


def resources_of(job: Job) -> dict[str, float]:
    """Return the most that ``job`` reserves at any time, by Ray's resource name. Reads no files."""
    phases = bundles_of(job)
    names = {name for phase in phases for bundle in phase for name, _ in bundle.amounts}
    return {name: max(_sum(phase, name) for phase in phases) for name in sorted(names)}


def _sum(bundles: Sequence[Bundle], name: str) -> float:
    return sum(bundle.count * dict(bundle.amounts).get(name, 0.0) for bundle in bundles)


def phases_of(job: Job) -> tuple[Needs, ...]:
    """Return the needs of each phase of ``job``; an rft job samples first and then trains, never both at once."""
    return tuple(_needs(job, *phase) for phase in _phases(job))


def with_desired_counts(job: RLJob, desired: Desired) -> RLJob:
    """The job with the counts of actors, reward workers and environment workers that are desired now."""
    if desired.actors is not None:
        # Not validated: 0 actors pause generation, which can be desired of a run but not written in a job.
        job = replaced(job, actors=job.actors.model_copy(update={"count": desired.actors}))
    if desired.reward_workers is not None:
        job = replaced(job, reward_workers=replaced(job.reward_workers, count=desired.reward_workers))
    if desired.environment_workers is not None:
        workers = replaced(job.environment_workers, count=desired.environment_workers)
        job = replaced(job, environment_workers=workers)
    return job


def _phases(job: Job) -> tuple[tuple[Sampled | None, Trained | None], ...]:
    """Return the jobs whose actors and workers, and whose learner, each phase of ``job`` starts."""
    match job:
        case RLJob():
            return ((job, job),)
        case SFTJob():
            return ((None, job),)
        case RFTJob():
            return ((job, None), (None, job))
        case EvalJob():
            return ((job, None),)


def actors_of(job: Job) -> ActorsSpec | None:
    """Return the job's actors, if it has any. Reads no files."""
    return next((sampled.actors for sampled, _ in _phases(job) if sampled is not None), None)


def bundles_of(job: Job) -> tuple[tuple[Bundle, ...], ...]:
    """Return what the processes of each phase of ``job`` reserve. Reads no files."""
    return tuple(_bundles(*phase) for phase in _phases(job))


def _bundles(sampled: Sampled | None, trained: Trained | None) -> tuple[Bundle, ...]:
    """Return what the processes of each role reserve; roles that reserve nothing are left out."""
    found = []
    if sampled is not None:
        actors, workers, programs = sampled.actors, sampled.reward_workers, sampled.environment_workers
        found.append(("actor", _reserved(actors.cpus, actors.gpus, actors.resources), actors.count))
        if sampled.scorer is not None:
            found.append(("reward worker", _reserved(workers.cpus, 0, workers.resources), workers.count))
        if sampled.rollout is not None:
            found.append(("environment worker", _reserved(programs.cpus, 0, programs.resources), programs.count))
    if trained is not None:
        spec = trained.learner
        reserved = _reserved(spec.cpus_per_rank, spec.gpus_per_rank, spec.resources_per_rank)
        found.append(("learner rank", reserved, spec.ranks))
    return tuple(Bundle(role, tuple(amounts.items()), count) for role, amounts, count in found if amounts and count)


def _processes(sampled: Sampled | None, trained: Trained | None) -> list[Mapping[str, float]]:
    """Return what each process reserves; processes that reserve nothing are left out."""
    return [dict(bundle.amounts) for bundle in _bundles(sampled, trained) for _ in range(bundle.count)]


def _needs(job: Job, sampled: Sampled | None, trained: Trained | None) -> Needs:
    """Add up the actors and reward workers of ``sampled`` and the learner of ``trained``."""
    parameters = _parameters(job.model.folder)
    weights = parameters * WIDTHS[job.model.dtype]
    memory, stored, largest = RAY_BYTES, STORE_BYTES, 0
    if sampled is not None:
        actors = sampled.actors
        workers = 0 if sampled.scorer is None else sampled.reward_workers.count
        workers += 0 if sampled.rollout is None else sampled.environment_workers.count
        cache = 0 if actors.gpus else int(actors.kv_cache_gb * GIB)
        largest = ACTOR_BYTES + weights + cache
        memory += actors.count * largest + workers * WORKER_BYTES
    if trained is not None:
        spec = trained.learner
        full = trained.model.lora is None  # with LoRA the learner keeps little more than the weights
        states = 5 * weights if spec.gpus_per_rank else STATE_BYTES * parameters
        shared, own = states if full else weights, RANK_BYTES + _activations(trained)
        if isinstance(trained, RLJob) and trained.update.value_model is not None:  # trained whole, beside adapters too
            shared += 4 * weights if spec.gpus_per_rank else CRITIC_BYTES * parameters
        memory += spec.ranks * own + shared
        largest = max(largest, own + shared // spec.ranks)
        stored += 2 * weights if full else 0  # the version in use and the one being sent
    reserving = tuple(_processes(sampled, trained))
    cpus, gpus = _amount(reserving, "CPU"), _amount(reserving, "GPU")
    actors_spec = None if sampled is None else sampled.actors
    store = math.ceil(stored / UNSPILLED)
    return Needs(cpus, gpus, memory + stored, store, reserving, _custom(reserving), actors_spec, largest)


def _parameters(model: Path) -> int:
    """The number of parameters in the model's files, from their headers."""
    return sum(
        math.prod(tensor["shape"])
        for file in model.glob("*.safetensors")
        for name, tensor in _header(file).items()
        if name != "__metadata__"
    )


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: shape and dtype of each tensor. Raises `JobError` if there is none."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            return dict(json.loads(opened.read(min(length, MOST_HEADER))))
    except (OSError, ValueError, struct.error) as error:
        raise JobError(f"{file} is not a safetensors file: {error}") from error


def _activations(job: Trained) -> int:
    """Bytes that a rank on a CPU keeps for the backward pass of a micro-batch; 0 on a GPU, or for unknown shapes."""
    spec, shape, width = job.learner, Shape.of(job.model.folder), WIDTHS[job.model.dtype]
    if spec.gpus_per_rank or shape is None:
        return 0
    tokens = micro_batch_tokens(spec, shape, width)
    if isinstance(job, RLJob):  # a small batch does not fill a micro-batch
        rows = math.ceil(job.prompts_per_step / spec.sequence_groups) * job.sampling.n
        tokens = min(tokens, rows * (PROMPT_TOKENS + job.sampling.max_tokens) // spec.sequence_parallel)
    return tokens * shape.kept_bytes(width, checkpointed=spec.gradient_checkpointing)


def _most(*phases: Needs) -> Needs:
    """Return needs that suffice for each of the phases."""
    names = sorted({name for phase in phases for name in phase.custom})
    return Needs(
        cpus=max(phase.cpus for phase in phases),
        gpus=max(phase.gpus for phase in phases),
        memory_bytes=max(phase.memory_bytes for phase in phases),
        object_store_bytes=max(phase.object_store_bytes for phase in phases),
        custom={name: max(phase.custom.get(name, 0.0) for phase in phases) for name in names},
        actors=next((phase.actors for phase in phases if phase.actors is not None), None),
        largest_bytes=max(phase.largest_bytes for phase in phases),
    )


def needs_at_once(runs: Sequence[Needs], count: int) -> Needs:
    """Return needs that suffice for any ``count`` of the runs at the same time, on one stack."""

    def most(amounts: Iterable[float]) -> float:
        return sum(sorted(amounts, reverse=True)[:count])

    names = sorted({name for run in runs for name in run.custom})
    own = most(run.memory_bytes - RAY_BYTES for run in runs)
    return Needs(
        cpus=most(run.cpus for run in runs),
        gpus=most(run.gpus for run in runs),
        memory_bytes=int(own) + RAY_BYTES,
        object_store_bytes=int(most(run.object_store_bytes for run in runs)),
        custom={name: most(run.custom.get(name, 0.0) for run in runs) for name in names},
        actors=next((run.actors for run in runs if run.actors is not None), None),
        largest_bytes=max(run.largest_bytes for run in runs),
    )


def _custom(processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for process in processes for name in process} - {"CPU", "GPU"}
    return {name: _amount(processes, name) for name in sorted(names)}


def _amount(processes: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(process.get(name, 0.0) for process in processes)


def _reserved(cpus: float, gpus: float, custom: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in {"CPU": cpus, "GPU": gpus, **custom}.items() if amount}


def check_host(needs: Needs, folder: Path) -> None:
    """Raise `HostError` if memory, shared memory or disk space does not suffice for the run."""
    available = available_memory()
    if needs.memory_bytes > available:
        raise HostError(
            f"the run needs about {needs.memory_bytes / GIB:.1f} GiB of memory and {available / GIB:.1f} GiB are free: "
            f"{LOWER}, or free memory"
        )
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        raise HostError("there is no /dev/shm: mount a tmpfs there") from error
    if needs.object_store_bytes > shared:
        raise HostError(
            f"the run needs {needs.object_store_bytes / GIB:.1f} GiB of shared memory and /dev/shm has "
            f"{shared / GIB:.1f} GiB free: enlarge it (in a container: --shm-size=2g)"
        )
    disk = shutil.disk_usage(folder)
    if disk.free < GIB:
        raise HostError(f"{folder} has {disk.free / GIB:.1f} GiB of disk left: free at least 1 GiB")


def check_cluster(memory_bytes: int, largest_bytes: int, node_bytes: Sequence[int]) -> None:
    """Raise `JobError` if a run never fits on the cluster's nodes, even while no other run uses them.

    Args:
        memory_bytes, largest_bytes: of the run's `Needs`.
        node_bytes: memory of each node; () if that is not known.
    """
    if not node_bytes:
        return
    if memory_bytes > sum(node_bytes):
        where = f"{len(node_bytes)} nodes have" if len(node_bytes) > 1 else "node has"
        raise JobError(
            f"the run needs about {memory_bytes / GIB:.1f} GiB of memory and the cluster's {where} "
            f"{sum(node_bytes) / GIB:.1f} GiB: {LOWER}, or add nodes"
        )
    if largest_bytes > max(node_bytes):
        raise JobError(
            f"one process of the run needs about {largest_bytes / GIB:.1f} GiB of memory and the largest node "
            f"has {max(node_bytes) / GIB:.1f} GiB: lower actors.kv_cache_gb or learner.tokens_per_micro_batch, raise "
            "learner.ranks, or add a larger node"
        )
