"""The tasks of an environment, written as data for a job."""

import json
from pathlib import Path

from environments.outside.interpreter import outside_of, rows_of
from volley.errors import JobError
from volley.rollout import ProgramRollout, Rollout

SECONDS = 3600.0


def write_rows(rollout: Rollout | None, path: Path | None, most: int) -> tuple[Path, int]:
    """Write the tasks of the environment that ``rollout`` names; returns the file and the number of rows.

    Args:
        path: JSON lines file to write.
        most: rows at most; tasksets may be endless.

    Raises:
        JobError: the job has no environment with tasks, these cannot be read, or the file exists.
    """
    outside = None if rollout is None or isinstance(rollout, ProgramRollout) else outside_of(rollout)
    if outside is None:
        raise JobError(
            "the job has no environment that brings tasks: write rollout: {kind: verifiers, ...} or kind: openenv"
        )
    if path is None:
        raise JobError("the job has no data.path: name the file with --out")
    if path.exists():
        raise JobError(f"{path} exists: remove it, or name another file with --out")
    rows = rows_of(outside, most, SECONDS)
    if not rows:
        raise JobError("the environment has no tasks")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, len(rows)
