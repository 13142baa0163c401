"""The state that all routes share: one object per application."""

import asyncio
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from fastapi import Path as PathParameter

from services.api.auth import Tokens
from services.api.cluster import Cluster
from services.api.index import RunIndex
from services.api.jobs import Checker
from services.api.live import Live
from services.api.problems import Problem, no_run
from services.api.prometheus import ServiceMetrics
from services.api.samples import SampleIndex
from services.api.series import SeriesCache
from services.api.settings import ApiSettings
from services.jobs.job_file import Job
from services.store.redis import Store
from services.supervisor.ray_jobs import Launcher
from volley.job import JOB
from volley.state import Desired, Observed, RunRecord
from volley.views import RunId

JOBS_KEPT = 200


@dataclass(slots=True)
class Context:
    """The objects of one server that outlive a request."""

    settings: ApiSettings
    store: Store
    tokens: Tokens
    index: RunIndex
    series: SeriesCache
    samples: SampleIndex
    live: Live
    metrics: ServiceMetrics
    launcher: Launcher | None
    cluster: Cluster
    checker: Checker | None
    creating: dict[str, asyncio.Lock] = field(default_factory=dict)
    scaling: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))  # by owner
    jobs: OrderedDict[str, Job] = field(default_factory=OrderedDict)

    async def find_run(self, run_id: str) -> tuple[RunRecord, Desired, Observed]:
        """Return the run's record and states.

        Raises:
            Problem: 404: there is no such run. 409: another release wrote it, and this one cannot read it.
        """
        unreadable: dict[str, ValueError] = {}
        found = await self.store.read_runs([run_id], unreadable)
        for error in unreadable.values():
            raise Problem(409, "run-of-another-release", f"this release cannot read the run: {error}") from error
        if not found:
            self.forget(run_id)
            raise no_run(run_id)
        return found[0]

    async def exists(self, run_id: str) -> None:
        """Raise `Problem` 404 if there is no such run. Recently seen runs are answered without asking Redis."""
        if not await self.index.has(run_id):
            self.forget(run_id)
            raise no_run(run_id)

    def job(self, record: RunRecord) -> Job:
        """Return the run's job, parsed once. Raises `Problem` 409 if another release wrote it and it does not parse."""
        job = self.jobs.get(record.id)
        if job is None:
            try:
                job = self.jobs[record.id] = JOB.validate_python(record.job)
            except ValueError as error:
                raise Problem(
                    409, "job-of-another-release", f"this release cannot read the run's job: {error}"
                ) from error
            if len(self.jobs) > JOBS_KEPT:
                self.jobs.popitem(last=False)
        return job

    def forget(self, run_id: str) -> None:
        """Drop everything cached about a run that no longer exists."""
        self.jobs.pop(run_id, None)
        self.series.forget(run_id)
        self.samples.forget(run_id)
        self.index.forget(run_id)


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(context_of)]
RunPath = Annotated[RunId, PathParameter(alias="run_id", description="id of a run")]
