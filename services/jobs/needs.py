"""The resources that a job needs, and whether the host has them."""

import json
import math
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from volley.errors import HostError, JobError
from volley.job import ActorsSpec, EvalJob, RFTJob, RLJob, SFTJob
from volley.memory import available_memory
from volley.shape import WIDTHS, Shape, micro_batch_tokens

GIB = 1 << 30
# Measured resident memory of an idle process of each role, without the model.
ACTOR_BYTES = int(1.6 * GIB)
RANK_BYTES = int(0.9 * GIB)
WORKER_BYTES = int(0.15 * GIB)
RAY_BYTES = int(0.7 * GIB)
# Per parameter: weight, gradient, two moments, reference in float32; in bfloat16, with a float32 master copy, as many.
STATE_BYTES = 20
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


def needs_of(job: RLJob | SFTJob | RFTJob | EvalJob) -> Needs:
    """Return the most that ``job`` needs at any time; with its processes only if it has a single phase."""
    first, *others = phases_of(job)
    return _most(first, *others) if others else first


def phases_of(job: RLJob | SFTJob | RFTJob | EvalJob) -> tuple[Needs, ...]:
    """Return the needs of each phase of ``job``; an rft job samples first and then trains, never both at once."""
    match job:
        case RLJob():
            return (_needs(job, sampled=job, trained=job),)
        case SFTJob():
            return (_needs(job, trained=job),)
        case RFTJob():
            return (_needs(job, sampled=job), _needs(job, trained=job))
        case EvalJob():
            return (_needs(job, sampled=job),)


def _needs(
    job: RLJob | SFTJob | RFTJob | EvalJob,
    *,
    sampled: RLJob | RFTJob | EvalJob | None = None,
    trained: RLJob | SFTJob | RFTJob | None = None,
) -> Needs:
    """Add up the actors and reward workers of ``sampled`` and the learner of ``trained``."""
    parameters = _parameters(job.model.path)
    weights = parameters * WIDTHS[job.model.dtype]
    cpus = gpus = 0.0
    memory, store, largest = RAY_BYTES, 256 << 20, 0
    processes: list[Mapping[str, float]] = []
    if sampled is not None:
        actors, workers = sampled.actors, sampled.reward_workers
        scorers = 0 if sampled.scorer is None else workers.count
        cpus += actors.count * actors.cpus + scorers * workers.cpus
        gpus += actors.count * actors.gpus
        processes += [_reserved(actors.cpus, actors.gpus, actors.resources)] * actors.count
        processes += [_reserved(workers.cpus, 0, workers.resources)] * scorers
        cache = 0 if actors.gpus else int(actors.kv_cache_gb * GIB)
        if sampled.rollout is not None:
            programs = sampled.environment_workers
            cpus += programs.count * programs.cpus
            processes += [_reserved(programs.cpus, 0, programs.resources)] * programs.count
            memory += programs.count * WORKER_BYTES
        largest = ACTOR_BYTES + weights + cache
        memory += actors.count * largest + scorers * WORKER_BYTES
    if trained is not None:
        spec = trained.learner
        cpus += spec.ranks * spec.cpus_per_rank
        gpus += spec.ranks * spec.gpus_per_rank
        processes += [_reserved(spec.cpus_per_rank, spec.gpus_per_rank, spec.resources_per_rank)] * spec.ranks
        full = trained.model.lora is None  # with LoRA the learner keeps little more than the weights
        states = 5 * weights if spec.gpus_per_rank else STATE_BYTES * parameters
        shared, own = states if full else weights, RANK_BYTES + _activations(trained)
        memory += spec.ranks * own + shared
        largest = max(largest, own + shared // spec.ranks)
        store += 2 * weights if full else 0  # the version in use and the one being sent
    reserving = tuple(process for process in processes if process)
    actors_spec = None if sampled is None else sampled.actors
    return Needs(cpus, gpus, memory + store, store, reserving, _custom(reserving), actors_spec, largest)


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


def _activations(job: RLJob | SFTJob | RFTJob) -> int:
    """Bytes that a rank on a CPU keeps for the backward pass of a micro-batch; 0 on a GPU, or for unknown shapes."""
    spec, shape, width = job.learner, Shape.of(job.model.path), WIDTHS[job.model.dtype]
    if spec.gpus_per_rank or shape is None:
        return 0
    tokens = micro_batch_tokens(spec, shape, width)
    if isinstance(job, RLJob):  # a small batch does not fill a micro-batch
        rows = math.ceil(job.prompts_per_step / spec.ranks) * job.sampling.n
        tokens = min(tokens, rows * (PROMPT_TOKENS + job.sampling.max_tokens))
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


def _custom(processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for process in processes for name in process} - {"CPU", "GPU"}
    return {name: sum(process.get(name, 0.0) for process in processes) for name in sorted(names)}


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
