"""What a job needs of its host, and the checks made before any process starts."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from volley.errors import HostError
from volley.job import EvalJob, RFTJob, RLJob, SFTJob

GIB = 1 << 30
# Resident memory of an idle process of each role with a small model, as measured; the model comes on top.
ACTOR_BYTES = int(1.6 * GIB)
RANK_BYTES = int(0.9 * GIB)
WORKER_BYTES = int(0.15 * GIB)
RAY_BYTES = int(0.7 * GIB)


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources a job reserves from Ray, and the memory its processes will take on one host.

    Attributes:
        processes: what each process reserves, by Ray's name of the resource; those that reserve nothing left out.
        custom: the sum of each custom resource.
    """

    cpus: float
    gpus: float
    memory_bytes: int
    object_store_bytes: int
    processes: tuple[Mapping[str, float], ...] = ()
    custom: Mapping[str, float] = field(default_factory=dict)


def needs_of(job: RLJob | SFTJob | RFTJob | EvalJob) -> Needs:
    """The most ``job`` needs at any time, model size included; its processes too where it has one phase only."""
    first, *others = phases_of(job)
    return _most(first, *others) if others else first


def phases_of(job: RLJob | SFTJob | RFTJob | EvalJob) -> tuple[Needs, ...]:
    """What ``job`` needs in each of its phases: a job that samples first and trains then never holds both roles."""
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
    """Of the actors and reward workers of ``sampled`` and the learner of ``trained``, together."""
    weights = sum(file.stat().st_size for file in job.model.path.glob("*.safetensors"))
    cpus = gpus = 0.0
    memory, store = RAY_BYTES, 256 << 20
    processes: list[Mapping[str, float]] = []
    if sampled is not None:
        actors, workers = sampled.actors, sampled.reward_workers
        cpus += actors.count * actors.cpus + workers.count * workers.cpus
        gpus += actors.count * actors.gpus
        processes += [_reserved(actors.cpus, actors.gpus, actors.resources)] * actors.count
        processes += [_reserved(workers.cpus, 0, workers.resources)] * workers.count
        cache = 0 if actors.gpus else int(actors.kv_cache_gb * GIB)
        memory += actors.count * (ACTOR_BYTES + weights + cache) + workers.count * WORKER_BYTES
    if trained is not None:
        spec = trained.learner
        cpus += spec.ranks * spec.cpus_per_rank
        gpus += spec.ranks * spec.gpus_per_rank
        processes += [_reserved(spec.cpus_per_rank, spec.gpus_per_rank, spec.resources_per_rank)] * spec.ranks
        whole = trained.model.lora is None  # parameters, gradient, two moments, reference; adapters need but the first
        memory += spec.ranks * RANK_BYTES + (5 if whole else 1) * weights
        store += 2 * weights if whole else 0  # the version in use and the one being sent
    reserving = tuple(process for process in processes if process)
    return Needs(cpus, gpus, memory + store, store, reserving, _custom(reserving))


def _most(*phases: Needs) -> Needs:
    """Enough for each of the phases."""
    names = sorted({name for phase in phases for name in phase.custom})
    return Needs(
        cpus=max(phase.cpus for phase in phases),
        gpus=max(phase.gpus for phase in phases),
        memory_bytes=max(phase.memory_bytes for phase in phases),
        object_store_bytes=max(phase.object_store_bytes for phase in phases),
        custom={name: max(phase.custom.get(name, 0.0) for phase in phases) for name in names},
    )


def _custom(processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for process in processes for name in process} - {"CPU", "GPU"}
    return {name: sum(process.get(name, 0.0) for process in processes) for name in sorted(names)}


def _reserved(cpus: float, gpus: float, custom: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in {"CPU": cpus, "GPU": gpus, **custom}.items() if amount}


def check_host(needs: Needs, folder: Path) -> None:
    """Raise `HostError` where memory, shared memory or disk can not hold the run."""
    available = available_memory()
    if needs.memory_bytes > available:
        raise HostError(
            f"the run needs about {needs.memory_bytes / GIB:.1f} GiB of memory and {available / GIB:.1f} GiB are free: "
            "lower actors.count, actors.kv_cache_gb or learner.ranks, or free memory"
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


def available_memory() -> int:
    """Bytes the kernel says can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
