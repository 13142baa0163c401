"""A job's `RuntimeEnvSpec` on its way to Ray, and its folders made importable where a job is checked."""

import sys
from pathlib import Path
from typing import Any

from services.job_file import importable_from
from volley.errors import JobError
from volley.runtime_env import RuntimeEnvSpec


def for_ray(spec: RuntimeEnvSpec | None) -> dict[str, Any]:
    """The ``runtime_env`` of ``ray.init``; empty where the job asks for nothing."""
    return {} if spec is None else {name: value for name, value in spec.model_dump(mode="json").items() if value}


def make_importable(spec: RuntimeEnvSpec | None) -> None:
    """Let this process import what the folders hold: Ray does so for the run's other processes only.

    Raises:
        JobError: one of them is no folder here.
    """
    if spec is None:
        return
    for place in spec.places:
        if "://" in place:
            continue
        if not Path(place).is_dir():
            raise JobError(f"runtime_env: {place} is no folder here; give one that the driver sees, or a zip's URI")
        folder = Path(place) if place == spec.working_dir else Path(place).parent
        if str(folder.resolve()) not in sys.path:
            importable_from(folder)


def code_is_here(spec: RuntimeEnvSpec | None) -> bool:
    """Can this process import all that the run's processes will?"""
    return spec is None or not spec.comes_later
