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


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, to ``checkpoints/step-<step>``."""

    def __init__(self, folder: RunFolder, spec: CheckpointSpec) -> None:
        self._folder, self._spec = folder, spec

    async def begin(
        self, learner: Learner, step: int, state: Mapping[str, Any], files: Mapping[str, bytes] | None = None
    ) -> None:
        """Start to write a checkpoint; returns when the learner may take its next step.

        Args:
            step: steps done.
            state: what else a resumed run must know; JSON.
            files: contents of further files, by name.

        Raises:
            DiskFull: the disk has no space for it now; earlier checkpoints are untouched.
            HostError: it cannot be written; earlier checkpoints are untouched.
        """
        path, extra = self._folder.checkpoints / f"step-{step}", {"step": step, **state}
        await learner.begin_save(path, extra, files, background=self._spec.background)

    async def stored(self, learner: Learner) -> None:
        """Wait until the checkpoint is complete, then remove those that the job does not keep. Raises as `begin`."""
        await learner.saved()
        for old in complete_checkpoints(self._folder)[: -self._spec.keep]:
            if self._spec.keep_every is None or steps_of(old) % self._spec.keep_every:
                await asyncio.to_thread(shutil.rmtree, old)


def steps_of(checkpoint: Path) -> int:
    """The number of steps done when the checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def complete_checkpoints(folder: RunFolder) -> list[Path]:
    """The run's checkpoints, fewest steps first."""
    found = (path for path in folder.checkpoints.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted(found, key=steps_of)
