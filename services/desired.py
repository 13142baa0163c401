"""Desired state: what the user wants of a live run beyond its job. A file in the run folder, read at every step."""

from typing import Any

from pydantic import Field, ValidationError

from services.job_file import explain
from services.run_folder import RunFolder
from volley.base import Spec
from volley.errors import JobError
from volley.job import RLJob
from volley.objectives import check_objective, with_changes
from volley.update import check_update

FILE = "desired.json"


class Desired(Spec):
    """Changes to a live run. Nothing set changes nothing."""

    objective: dict[str, Any] = Field(default_factory=dict, description="fields in place of the objective's")


def read_desired(folder: RunFolder) -> Desired:
    """What is desired of the run; raises `JobError` for a file that does not say it properly."""
    file = folder.path / FILE
    if not file.exists():
        return Desired()
    try:
        return Desired.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise JobError(explain(file, error)) from error


def change_objective(folder: RunFolder, job: RLJob, changes: dict[str, Any]) -> Desired:
    """Add ``changes`` to what is desired of the run's objective; it holds from the next step on.

    Raises:
        JobError: the objective has no such field, or would be undefined for the job's n.
    """
    desired = read_desired(folder)
    wanted = {**desired.objective, **changes}
    try:
        objective = with_changes(job.objective, wanted)
        check_objective(objective, job.sampling.n)
        check_update(job.update, objective)
    except ValidationError as error:
        raise JobError(explain("objective", error)) from error
    except ValueError as error:
        raise JobError(f"objective: {error}") from error
    desired = Desired(objective=wanted)
    aside = folder.path / f".{FILE}.partial"
    aside.write_text(desired.model_dump_json(indent=2) + "\n")
    aside.replace(folder.path / FILE)  # a reader sees the old file or the new one
    return desired
