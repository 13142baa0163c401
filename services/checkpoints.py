"""Checkpoints of a run: complete or absent, the newest few kept, and every so many for good."""

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.roles import Learner
from services.run_folder import RunFolder
from volley.errors import JobError
from volley.job import CheckpointSpec


def newest_checkpoint(folder: RunFolder) -> Path:
    """The checkpoint with the most steps; raises `JobError` where there is none."""
    complete = complete_checkpoints(folder)
    if not complete:
        raise JobError(f"{folder.path} has no checkpoint to resume from; set checkpoint.every in the job")
    return complete[-1]


async def save_checkpoint(
    learner: Learner,
    folder: RunFolder,
    spec: CheckpointSpec,
    step: int,
    state: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write ``checkpoints/step-<step>``, then remove those that are not to be kept.

    Args:
        step: steps done.
        state: what else a resumed run must know, JSON.
        files: what lies beside the learner's own files, by name.

    Raises:
        HostError: the disk does not take it (`DiskFull`: for now); the checkpoints before it are untouched.
    """
    await learner.save(folder.checkpoints / f"step-{step}", {"step": step, **state}, files)
    for old in complete_checkpoints(folder)[: -spec.keep]:
        if spec.keep_every is None or steps_of(old) % spec.keep_every:
            await asyncio.to_thread(shutil.rmtree, old)


def steps_of(checkpoint: Path) -> int:
    """Steps done when it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def complete_checkpoints(folder: RunFolder) -> list[Path]:
    """The run's checkpoints, fewest steps first."""
    found = (path for path in folder.checkpoints.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted(found, key=steps_of)
