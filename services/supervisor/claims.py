"""What runs reserve: the resources of their jobs, with the numbers of workers that are desired now."""

from collections.abc import Collection, Mapping, Sequence

from services.jobs.job_file import Job
from services.jobs.needs import bundles_of, resources_of, with_desired_counts
from services.supervisor.fit import misfit
from volley.base import replaced
from volley.job import JOB, ActorsSpec, RewardWorkersSpec, RLJob, SFTJob
from volley.state import Desired, Observed, RunRecord

ROLES = ("actors", "reward_workers", "environment_workers")


class Claims:
    """The resources of runs. Their jobs are parsed once."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job | None] = {}

    def of(self, record: RunRecord, desired: Desired, observed: Observed) -> tuple[dict[str, float], dict[str, float]]:
        """Return what the run reserves and the most that it may reserve, by Ray's resource name.

        Args:
            observed: the number of workers that a run has which scales itself; none without a driver.
        """
        job = self._job(record)
        if job is None:
            return {}, {}
        return resources_of(sized(job, desired, observed)), resources_of(largest(job, desired))

    def misfit(
        self, record: RunRecord, desired: Desired, observed: Observed, nodes: Sequence[Mapping[str, float]]
    ) -> str:
        """Say why the run's processes never fit on these nodes; "" if they do."""
        job = self._job(record)
        return "" if job is None else misfit(bundles_of(sized(job, desired, observed)), nodes)

    def _job(self, record: RunRecord) -> Job | None:
        if record.id not in self._jobs:
            self._jobs[record.id] = _parsed(record)
        return self._jobs[record.id]

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget all other runs."""
        self._jobs = {run_id: job for run_id, job in self._jobs.items() if run_id in run_ids}


def sized(job: Job, desired: Desired, observed: Observed) -> Job:
    """Return the job with the numbers of workers that are desired, or that the run has given itself."""
    if not isinstance(job, RLJob):
        return job
    seen = {role: max(getattr(observed, role), getattr(observed, f"{role}_wanted")) for role in ROLES}
    grown = {
        role: count
        for role, count in seen.items()
        if getattr(desired, role) is None and count > getattr(job, role).count
    }
    return with_desired_counts(job, replaced(desired, **grown))


def largest(job: Job, desired: Desired) -> Job:
    """Return the job with the largest numbers of workers that the run may give itself."""
    if isinstance(job, SFTJob):
        return job
    fixed = {role for role in ROLES if isinstance(job, RLJob) and getattr(desired, role) is not None}
    parts = {role: _at_its_limit(getattr(job, role)) for role in ROLES if role not in fixed}
    grown = job.model_copy(update=parts)
    return with_desired_counts(grown, desired) if isinstance(grown, RLJob) else grown


def _at_its_limit(spec: ActorsSpec | RewardWorkersSpec) -> ActorsSpec | RewardWorkersSpec:
    return spec.model_copy(update={"count": max(spec.count, spec.max_count or 0)})


def _parsed(record: RunRecord) -> Job | None:
    """Return the run's job; None if this release cannot read it, which its driver reports."""
    try:
        return JOB.validate_python(record.job)
    except ValueError:
        return None
