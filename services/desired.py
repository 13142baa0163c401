"""Changing a live run: what may be desired of it, and where that is kept.

Two places say what is desired: ``desired.json`` in the run folder, for the command line beside a run, and Redis, for
the service. Each change counts the revision up; the run's driver takes the higher one and copies it to the other.
"""

from typing import Any

from pydantic import ValidationError

from services.job_file import Job, explain
from services.run_folder import RunFolder
from services.state import Desired
from volley.errors import JobError
from volley.job import RFTJob, RLJob, SFTJob
from volley.objectives import check_objective, resolve
from volley.update import check_update

FILE = "desired.json"
FIELDS = frozenset(Desired.model_fields) - {"revision"}


def change(desired: Desired, job: Job, changes: dict[str, Any]) -> Desired:
    """``desired`` with ``changes`` laid over it and its revision counted up.

    Args:
        changes: fields of `Desired`; those of ``objective`` add up, the others replace. Null is as the job says.

    Raises:
        JobError: there is no such field, the job has no such part, or the objective would be undefined for its n.
    """
    if unknown := sorted(set(changes) - FIELDS):
        choices = ", ".join(sorted(FIELDS))
        raise JobError(f"{', '.join(unknown)}: not to be changed on a live run; choose from {choices}")
    _check_kind(job, changes)
    if "objective" in changes:
        changes = {**changes, "objective": _laid_over(desired.objective, changes["objective"])}
    try:
        wanted = Desired.model_validate({**desired.model_dump(), **_with_defaults(changes)})
    except ValidationError as error:
        raise JobError(explain("change", error)) from error
    check_desired(job, wanted)
    return wanted.model_copy(update={"revision": desired.revision + 1})


def check_desired(job: Job, desired: Desired) -> None:
    """Raises `JobError` where the objective would be undefined at some step of the job."""
    if isinstance(job, RLJob):
        _check_objective(job, desired.objective)


def read_desired(folder: RunFolder) -> Desired:
    """What the run folder's file says; raises `JobError` for a file that does not say it properly."""
    file = folder.path / FILE
    if not file.exists():
        return Desired()
    try:
        return Desired.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise JobError(explain(file, error)) from error


def write_desired(folder: RunFolder, desired: Desired) -> None:
    """Replace the file; a reader sees the old one or the new one."""
    aside = folder.path / f".{FILE}.partial"
    aside.write_text(desired.model_dump_json(indent=2) + "\n")
    aside.replace(folder.path / FILE)


def change_in_folder(folder: RunFolder, job: Job, changes: dict[str, Any]) -> Desired:
    """`change` the desired state in the run folder; a live run there takes it up within seconds."""
    desired = change(read_desired(folder), job, changes)
    write_desired(folder, desired)
    return desired


def _laid_over(before: dict[str, Any], added: dict[str, Any] | None) -> dict[str, Any]:
    """Null in place of a field is as the job says; null in place of all of them is so of all."""
    return {} if added is None else {key: value for key, value in {**before, **added}.items() if value is not None}


def _check_kind(job: Job, changes: dict[str, Any]) -> None:
    """Only some kinds of job have what a change is about."""
    missing = {"objective", "learning_rate", "max_lag"} if not isinstance(job, RLJob) else set()
    if isinstance(job, SFTJob | RFTJob):
        missing |= {"actors", "reward_workers", "paused"}
    if wrong := sorted(key for key in missing & changes.keys() if changes[key] not in (None, {}, False)):
        raise JobError(f"{', '.join(wrong)}: a job of kind {job.kind} has none")


def _with_defaults(changes: dict[str, Any]) -> dict[str, Any]:
    """Null in place of a switch is its default."""
    defaults = {"paused": False, "stopped": False, "objective": {}}
    return {key: defaults.get(key) if value is None else value for key, value in changes.items()}


def _check_objective(job: RLJob, fields: dict[str, Any]) -> None:
    """The objective must be one at the start and after every stage of the schedule."""
    try:
        for step in (0, *(stage.at for stage in job.schedule.stages)):
            objective = resolve(job.objective, job.schedule, step, fields)
            check_objective(objective, job.sampling.n)
            check_update(job.update, objective)
    except ValidationError as error:
        raise JobError(explain("objective", error)) from error
    except ValueError as error:
        raise JobError(f"objective: {error}") from error
