"""What a job needs of its host, and the checks made before any process starts."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from volley.errors import HostError
from volley.job import EvalJob, RLJob, SFTJob

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
    """

    cpus: float
    gpus: float
    memory_bytes: int
    object_store_bytes: int
    processes: tuple[Mapping[str, float], ...] = ()

    @property
    def custom(self) -> dict[str, float]:
        """The sum of each custom resource."""
        names = {name for process in self.processes for name in process} - {"CPU", "GPU"}
        return {name: sum(process.get(name, 0.0) for process in self.processes) for name in sorted(names)}


def needs_of(job: RLJob | SFTJob | EvalJob) -> Needs:
    """What ``job`` needs, model size included."""
    weights = sum(file.stat().st_size for file in job.model.path.glob("*.safetensors"))
    cpus = gpus = 0.0
    memory, store = RAY_BYTES, 256 << 20
    processes: list[Mapping[str, float]] = []
    if isinstance(job, RLJob | EvalJob):
        cpus += job.actors.count * job.actors.cpus + job.reward_workers.count * job.reward_workers.cpus
        gpus += job.actors.count * job.actors.gpus
        processes += [_reserved(job.actors.cpus, job.actors.gpus, job.actors.resources)] * job.actors.count
        processes += [_reserved(job.reward_workers.cpus, 0, job.reward_workers.resources)] * job.reward_workers.count
        cache = 0 if job.actors.gpus else int(job.actors.kv_cache_gb * GIB)
        memory += job.actors.count * (ACTOR_BYTES + weights + cache) + job.reward_workers.count * WORKER_BYTES
    if isinstance(job, RLJob | SFTJob):
        cpus += job.learner.ranks * job.learner.cpus_per_rank
        gpus += job.learner.ranks * job.learner.gpus_per_rank
        spec = job.learner
        processes += [_reserved(spec.cpus_per_rank, spec.gpus_per_rank, spec.resources_per_rank)] * spec.ranks
        memory += job.learner.ranks * RANK_BYTES + 5 * weights  # parameters, gradient, two moments, reference
        store += 2 * weights  # the version in use and the one being sent
    return Needs(cpus, gpus, memory + store, store, tuple(process for process in processes if process))


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
