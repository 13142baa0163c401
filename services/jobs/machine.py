"""What this machine can compute on: bfloat16 needs instructions that many processors lack, and GPUs a driver."""

from pathlib import Path
from typing import TYPE_CHECKING

from volley.job import EvalJob, SFTJob

if TYPE_CHECKING:
    from services.jobs.job_file import Job

CPUINFO = Path("/proc/cpuinfo")
NVIDIA = Path("/proc/driver/nvidia/version")  # exists on a machine with GPUs
BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # x86's tiles and vectors, Arm's


def bfloat16_notice(job: "Job", cpuinfo: Path = CPUINFO) -> str:
    """Advice if ``job`` computes in bfloat16 on this machine's CPUs, which cannot; otherwise ""."""
    if job.model.dtype != "bfloat16" or not _on_cpus(job):
        return ""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    flags = {
        flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()
    }
    if not flags or flags & BFLOAT16:
        return ""
    return (
        "model.dtype is bfloat16, and this processor has no instructions for it (avx512_bf16, amx_bf16): engines may "
        "end with SIGILL; write dtype: float32"
    )


def gpu_notice(job: "Job", driver: Path = NVIDIA) -> str:
    """Advice if ``job`` reserves GPUs and this machine has none; otherwise ""."""
    amounts = {
        "actors.gpus": 0 if isinstance(job, SFTJob) else job.actors.gpus,
        "learner.gpus_per_rank": 0 if isinstance(job, EvalJob) else job.learner.gpus_per_rank,
    }
    asked = [key for key, amount in amounts.items() if amount]
    if not asked or driver.exists():
        return ""
    return f"{' and '.join(asked)}: this host has no GPU; write 0 to compute on CPUs, or run the job on a cluster"


def _on_cpus(job: "Job") -> bool:
    actors = not isinstance(job, SFTJob) and not job.actors.gpus
    learner = not isinstance(job, EvalJob) and not job.learner.gpus_per_rank
    return actors or learner
