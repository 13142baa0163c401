"""The desired state of a live run: which changes are valid, and where they are stored.

The desired state is stored in ``desired.json`` in the run folder, for the command line on the same machine, and in
Redis, for the service. Each change increments the revision; the run's driver uses the copy with the higher revision and
copies it to the other place. Changes made in both places at the same time are combined.
"""

import contextlib
import time
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from services.jobs.job_file import Job, explain
from services.jobs.needs import with_desired_counts
from services.store.folder import RunFolder
from volley.errors import HostError, JobError
from volley.files import replace_text
from volley.job import RLJob
from volley.needed_scores import check_scorer
from volley.objectives import check_objective, resolve
from volley.objectives.spec import OVER_TRIES
from volley.objectives.tries import with_tries
from volley.state import AuditRecord, Desired
from volley.update import check_update

if TYPE_CHECKING:
    from services.store.redis import Store  # the command line reads a run folder without Redis

FILE = "desired.json"
FIELDS = frozenset(Desired.model_fields) - {"revision"}


def change(desired: Desired, job: Job, changes: dict[str, Any]) -> Desired:
    """Return ``desired`` with ``changes`` applied and its revision incremented.

    Args:
        changes: fields of `Desired`. Those of ``objective`` are merged, the others replaced; null reverts a field to
            the job's value.

    Raises:
        JobError: a field is unknown, does not exist for this kind of job, or makes the objective undefined for its n.
    """
    if unknown := sorted(set(changes) - FIELDS):
        choices = ", ".join(sorted(FIELDS))
        raise JobError(f"{', '.join(unknown)}: cannot be changed on a live run; choose from {choices}")
    _check_kind(job, changes)
    if "objective" in changes:
        changes = {**changes, "objective": _merged(job, desired.objective, changes["objective"])}
    try:
        changed = Desired.model_validate({**desired.model_dump(), **_with_defaults(changes)})
    except ValidationError as error:
        raise JobError(explain("change", error)) from error
    check_desired(job, changed)
    return changed.model_copy(update={"revision": desired.revision + 1})


def check_desired(job: Job, desired: Desired) -> None:
    """Raise `JobError` if the objective would be undefined at some step, or if the job cannot have these workers."""
    if isinstance(job, RLJob):
        _check_objective(job, desired.objective)
        try:
            with_desired_counts(job, desired)
        except ValidationError as error:
            raise JobError(explain("change", error)) from error


def read_desired(folder: RunFolder) -> Desired:
    """Read the desired state in the run folder. Raises `JobError` if the file is invalid."""
    file = folder.path / FILE
    if not file.exists():
        return Desired()
    try:
        return Desired.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise JobError(explain(file, error)) from error


def write_desired(folder: RunFolder, desired: Desired) -> None:
    """Replace the desired state in the run folder, atomically."""
    replace_text(folder.path / FILE, desired.model_dump_json(indent=2) + "\n")


class DesiredCopies:
    """The desired state in the run folder and in Redis, and what the run's driver, which reads both, remembers of them.

    Args:
        common: what both had when the driver started.
    """

    def __init__(self, folder: RunFolder, store: "Store", common: Desired | None = None) -> None:
        self._folder, self._store = folder, store
        self._common = self._newest = common

    async def newest(self) -> Desired:
        """Return the newest desired state, and copy it where it is missing. Redis may be away.

        What this returned before is a third copy, and newest where the other two are from before, as after a full disk
        and a restored Redis.

        Raises:
            JobError: the file in the run folder is invalid.
        """
        found = read_desired(self._folder)
        local = self._newest if self._newest is not None and self._newest.revision > found.revision else found
        try:
            newest = await self._copy_to_redis(local)
        except HostError:
            self._newest = local
            return local
        if read_desired(self._folder) != found:  # changed meanwhile
            return await self.newest()
        self._newest = newest
        with contextlib.suppress(OSError):  # if the disk is full, the copy fails but the change must still apply
            if newest != found:
                write_desired(self._folder, newest)
            self._common = newest
        return newest

    async def _copy_to_redis(self, local: Desired) -> Desired:
        """Return what Redis has after it has taken up ``local``."""
        run_id, common = self._folder.run_id, self._common
        stored = await self._store.desired(run_id)
        newest = combined(local, stored, common)
        if newest.revision <= stored.revision:
            return stored
        audit = _copied(self._folder, newest, stored)
        return await self._store.change_desired(run_id, lambda current: combined(local, current, common), audit)


async def newest_desired(folder: RunFolder, store: "Store") -> Desired:
    """Return the newest desired state of a run; see `DesiredCopies.newest`."""
    return await DesiredCopies(folder, store).newest()


def combined(local: Desired, stored: Desired, common: Desired | None) -> Desired:
    """Return the newer of the desired states in the run folder and in Redis.

    If both were changed since both were ``common``, it has the changes of both, and a revision above theirs; a field
    that both changed has the folder's value. Equal revisions are combined too, as a restored Redis may use them again;
    without ``common``, all fields count as changed in the folder. The priority, which only the service changes, is
    always that in Redis.
    """
    local = local.model_copy(update={"priority": stored.priority})
    newer = local if local.revision > stored.revision else stored
    if local.model_copy(update={"revision": stored.revision}) == stored:
        return newer
    equal = local.revision == stored.revision
    if common is not None and (equal or min(local.revision, stored.revision) > common.revision):
        changed = {name: getattr(local, name) for name in FIELDS if getattr(local, name) != getattr(common, name)}
        both = stored.model_copy(update={**changed, "priority": stored.priority})
    elif equal:
        both = local
    else:
        return newer
    return both.model_copy(update={"revision": newer.revision + 1})


def change_in_folder(folder: RunFolder, job: Job, changes: dict[str, Any]) -> Desired:
    """Apply `change` to the desired state in the run folder; a live run applies it within seconds.

    Raises:
        JobError: the change is not possible, or not in a folder.
    """
    if "priority" in changes:
        raise JobError("priority: only the service has a queue; name the run by its id")
    desired = change(read_desired(folder), job, changes)
    write_desired(folder, desired)
    return desired


def _copied(folder: RunFolder, local: Desired, stored: Desired) -> AuditRecord:
    """Record what somebody who can write to the run folder has changed."""
    before, after = stored.model_dump(), local.model_dump(exclude={"revision"})
    details = {name: value for name, value in after.items() if value != before[name]}
    return AuditRecord(time=time.time(), who="run-folder", action="set", run=folder.run_id, details=details)


def _merged(job: Job, before: dict[str, Any], added: dict[str, Any] | None) -> dict[str, Any]:
    """Merge fields of the objective. A null field reverts to the job's value; null instead of a mapping reverts all."""
    if added is None:
        return {}
    own = job.objective.kind if isinstance(job, RLJob) else None
    kind = added.get("kind") or before.get("kind") or own
    merged = with_tries(before, added) if isinstance(kind, str) and kind in OVER_TRIES else {**before, **added}
    return {key: value for key, value in merged.items() if value is not None}


def _check_kind(job: Job, changes: dict[str, Any]) -> None:
    """Raise `JobError` for changes that do not apply to this kind of job."""
    missing = FIELDS - {"stopped", "priority"} if not isinstance(job, RLJob) else set()
    if wrong := sorted(key for key in missing & changes.keys() if _is_change(changes[key])):
        raise JobError(
            f"{', '.join(wrong)}: does not apply to a job of kind {job.kind}, which can only be stopped and resumed"
        )
    if changes.get("environment_workers") is not None and getattr(job, "rollout", None) is None:
        raise JobError("environment_workers: does not apply to a job without rollout, whose samples no program makes")


def _is_change(value: object) -> bool:
    """Whether a value is another than what a job without it has; 0 is, and equals False."""
    return value is not None and value is not False and value != {}


def _with_defaults(changes: dict[str, Any]) -> dict[str, Any]:
    """Replace null by the default for fields that are not nullable."""
    defaults = {"paused": False, "stopped": False, "objective": {}, "priority": 0}
    return {key: defaults.get(key) if value is None else value for key, value in changes.items()}


def _check_objective(job: RLJob, fields: dict[str, Any]) -> None:
    """Raise `JobError` unless the objective is valid at the start and at every stage of the schedule."""
    try:
        for step in job.schedule.turning_points:
            objective = resolve(job.objective, job.schedule, step, fields)
            check_objective(objective, job.sampling.n)
            check_update(job.update, objective)
            check_scorer(job.scorer, objective, has_program=job.rollout is not None)
    except ValidationError as error:
        if unknown := [str(each["loc"][-1]) for each in error.errors() if each["type"] == "extra_forbidden"]:
            raise JobError(
                f"{', '.join(unknown)}: neither a field of the objective, such as k, nor one of "
                f"{', '.join(sorted(FIELDS - {'objective'}))}, and nothing else can be changed on a live run"
            ) from error
        raise JobError(explain("objective", error)) from error
    except ValueError as error:
        raise JobError(f"objective: {error}") from error
