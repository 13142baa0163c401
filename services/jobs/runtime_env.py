"""Passes a job's `RuntimeEnvSpec` to Ray, and makes its folders importable in the process that checks the job."""

import sys
from pathlib import Path
from typing import Any

from services.jobs.job_file import importable_from
from volley.errors import JobError
from volley.runtime_env import RuntimeEnvSpec


def for_ray(spec: RuntimeEnvSpec | None) -> dict[str, Any]:
    """Return the ``runtime_env`` for ``ray.init``; empty if the job has none."""
    return {} if spec is None else {name: value for name, value in spec.model_dump(mode="json").items() if value}


def make_importable(spec: RuntimeEnvSpec | None) -> None:
    """Let this process import from the job's folders; Ray does that only for the run's other processes.

    Raises:
        JobError: one of them is not a folder on this machine.
    """
    if spec is None:
        return
    for place in spec.places:
        if "://" in place:
            continue
        if not Path(place).is_dir():
            raise JobError(
                f"runtime_env: {place} is not a folder on this machine; write one that the driver can see, or the URI "
                "of a zip file"
            )
        folder = Path(place) if place == spec.working_dir else Path(place).parent
        if str(folder.resolve()) not in sys.path:
            importable_from(folder)


def code_is_here(spec: RuntimeEnvSpec | None) -> bool:
    """Return whether this process can already import everything that the run's processes will."""
    return spec is None or not spec.comes_later
