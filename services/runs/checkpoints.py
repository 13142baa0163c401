"""The checkpoints of a run: each one complete or absent; old ones are removed, except those kept for good."""

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.coordinator.roles import Learner
from services.store.folder import RunFolder
from volley.errors import JobError
from volley.job import CheckpointSpec


def newest_checkpoint(folder: RunFolder) -> Path:
    """The checkpoint with the most steps; raises `JobError` if there is none."""
    newest = newest_checkpoint_or_none(folder)
    if newest is None:
        raise JobError(f"{folder.path} has no checkpoint to resume from; set checkpoint.every in the job")
    return newest


def newest_checkpoint_or_none(folder: RunFolder) -> Path | None:
    """The checkpoint with the most steps, or None."""
    return next(reversed(complete_checkpoints(folder)), None)


async def save_checkpoint(
    learner: Learner,
    folder: RunFolder,
    spec: CheckpointSpec,
    step: int,
    state: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write ``checkpoints/step-<step>``, then remove the checkpoints that ``spec`` does not keep.

    Args:
        step: steps done.
        state: what else a resumed run must know; JSON.
        files: contents of further files, by name.

    Raises:
        DiskFull: the disk has no space for it now; earlier checkpoints are untouched.
        HostError: it cannot be written; earlier checkpoints are untouched.
    """
    await learner.save(folder.checkpoints / f"step-{step}", {"step": step, **state}, files)
    for old in complete_checkpoints(folder)[: -spec.keep]:
        if spec.keep_every is None or steps_of(old) % spec.keep_every:
            await asyncio.to_thread(shutil.rmtree, old)


def steps_of(checkpoint: Path) -> int:
    """The number of steps done when the checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def complete_checkpoints(folder: RunFolder) -> list[Path]:
    """The run's checkpoints, fewest steps first."""
    found = (path for path in folder.checkpoints.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted(found, key=steps_of)
