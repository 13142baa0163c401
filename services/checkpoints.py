"""Checkpoints of a run: written aside and renamed, the newest few kept."""

import asyncio
import shutil
from collections.abc import Mapping
from typing import Any

from services.roles import Learner
from services.run_folder import RunFolder
from volley.errors import HostError


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
    complete = sorted(folder.checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    for old in complete[:-keep]:
        await asyncio.to_thread(shutil.rmtree, old)
