"""What this machine's processor can compute: bfloat16 needs instructions that many lack."""

from pathlib import Path

from services.jobs.job_file import Job
from volley.job import EvalJob, SFTJob

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # x86's tiles and vectors, Arm's


def bfloat16_notice(job: Job, cpuinfo: Path = CPUINFO) -> str:
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


def _on_cpus(job: Job) -> bool:
    actors = not isinstance(job, SFTJob) and not job.actors.gpus
    learner = not isinstance(job, EvalJob) and not job.learner.gpus_per_rank
    return actors or learner
