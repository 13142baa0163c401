"""A whole run with the actor and the learner on a GPU each; weights go from one to the other by NCCL."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.jobs import run_job
from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu.whole_run import figures


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this section."""
    if setting.cuda and torch.cuda.device_count() < 2:
        yield Row("two devices", "not run", "this machine has one GPU")
        return
    folder = run_job(
        setting, "two-devices", gpus=(1, 1) if setting.cuda else (0, 0), broadcast={"transport": "collective"}
    )
    where = "two GPUs, by NCCL" if setting.cuda else "a CPU, by gloo"
    yield from figures("two devices", folder, setting, where)
