"""Checkpoints of a run: written aside and renamed, the newest few kept."""

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.roles import Learner
from services.run_folder import RunFolder
from volley.errors import HostError, JobError


def newest_checkpoint(folder: RunFolder) -> Path:
    """The checkpoint with the most steps; raises `JobError` where there is none."""
    complete = _complete(folder)
    if not complete:
        raise JobError(f"{folder.path} has no checkpoint to resume from; set checkpoint.every in the job")
    return complete[-1]


async def save_checkpoint(learner: Learner, folder: RunFolder, keep: int, step: int, state: Mapping[str, Any]) -> None:
    """Write ``checkpoints/step-<step>``, then remove all but the newest ``keep``.

    Args:
        step: steps done.
        state: what else a resumed run must know, JSON.

    Raises:
        HostError: the disk does not take it; the checkpoints before it are untouched.
    """
    try:
        await learner.save(folder.checkpoints / f"step-{step}", {"step": step, **state})
    except OSError as error:
        raise HostError(f"checkpoint of step {step} in {folder.checkpoints}: {error.strerror or error}") from error
    for old in _complete(folder)[:-keep]:
        await asyncio.to_thread(shutil.rmtree, old)


def steps_of(checkpoint: Path) -> int:
    """Steps done when it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def _complete(folder: RunFolder) -> list[Path]:
    found = (path for path in folder.checkpoints.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted(found, key=steps_of)
