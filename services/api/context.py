"""What the routes work with: one object for the life of an application."""

import asyncio
from collections import OrderedDict
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
from services.api.schemas import RunId
from services.api.series import SeriesCache
from services.api.settings import ApiSettings
from services.job_file import Job
from services.launcher import Launcher
from services.state import Desired, Observed, RunRecord
from services.store import Store
from volley.job import JOB

JOBS_KEPT = 200


@dataclass(slots=True)
class Context:
    """Everything of one server that outlives a request."""

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
    jobs: OrderedDict[str, Job] = field(default_factory=OrderedDict)

    async def look(self, run_id: str) -> tuple[RunRecord, Desired, Observed]:
        """Raises `Problem` 404 where there is no such run."""
        found = await self.store.look([run_id])
        if not found:
            self.forget(run_id)
            raise no_run(run_id)
        return found[0]

    async def exists(self, run_id: str) -> None:
        """Raises `Problem` 404 where there is no such run; of one that was there a moment ago Redis is not asked."""
        if not await self.index.has(run_id):
            self.forget(run_id)
            raise no_run(run_id)

    def job(self, record: RunRecord) -> Job:
        """The run's job, parsed once. Raises `Problem` 409 for a record of another release."""
        job = self.jobs.get(record.id)
        if job is None:
            try:
                job = self.jobs[record.id] = JOB.validate_python(record.job)
            except ValueError as error:
                raise Problem(
                    409, "job-of-another-release", f"this release can not read the run's job: {error}"
                ) from error
            if len(self.jobs) > JOBS_KEPT:
                self.jobs.popitem(last=False)
        return job

    def forget(self, run_id: str) -> None:
        """The run is gone."""
        self.jobs.pop(run_id, None)
        self.series.forget(run_id)
        self.samples.forget(run_id)
        self.index.forget(run_id)


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(context_of)]
RunPath = Annotated[RunId, PathParameter(alias="run_id", description="id of a run")]
