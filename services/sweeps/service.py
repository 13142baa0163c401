"""Runs of a sweep in a service, found again by their tags. They go on there if the command ends."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from services.jobs.job_file import Job, explain
from services.signals import StopSignal
from services.sweeps.plan import Found, Records
from services.sweeps.spec import Member, Sweep
from volley.client import AsyncClient, AsyncRun
from volley.errors import JobError, RunFailed
from volley.job import JOB

MOST = 100_000  # runs of a sweep, with those that were made again
TO_RESUME = ("failed", "stopped", "paused")


@dataclass(slots=True)
class ServiceRunner:
    """Submits each run, or resumes it, and waits for its end."""

    client: AsyncClient
    sweep: Sweep

    async def find(self, sweep: Sweep) -> dict[str, Found]:
        """The runs with the sweep's tag; of several for one member, one with its job, else the newest."""
        wanted = {member.name: member.job for member in sweep.members}
        found: dict[str, Found] = {}
        for summary in await self.client.runs(MOST, tags={"sweep": sweep.name}):
            name = summary.tags.get("member")
            if name is None or (name in found and found[name].job == wanted.get(name)):
                continue
            run = await self._found(AsyncRun(self.client, summary.id))
            if name not in found or run.job == wanted.get(name):
                found[name] = run
        return found

    @contextlib.asynccontextmanager
    async def ready(self, members: Sequence[Member]) -> AsyncIterator[None]:
        yield

    async def run(self, member: Member, found: Found | None, stop_signal: StopSignal) -> Found:
        """Make the run; see `services.sweeps.plan.Runner`. If it is cancelled, the run goes on in the service."""
        if found is None or found.job != member.job:
            key = hashlib.sha256(f"{self.sweep.name} {member.name} {member.job.model_dump_json()}".encode())
            tags = self.sweep.tags(member)
            run = await self.client.submit(member.job, tags=tags, key=f"sweep-{key.hexdigest()[:32]}")
        else:
            run = AsyncRun(self.client, found.where)
            if found.state in TO_RESUME:
                await run.resume()
        try:
            await run.wait()
        except RunFailed:
            return await self._found(run)
        return await self._found(run)

    async def progress(self, member: Member) -> str:
        return "in the service"

    async def records(self, member: Member, found: Found) -> Records:
        run = AsyncRun(self.client, found.where)
        metrics, evaluations = await asyncio.gather(run.metrics(), run.evaluations())
        return Records(metrics, evaluations.rows)

    async def _found(self, run: AsyncRun) -> Found:
        view = await run.view()
        return Found(view.state, view.observed.problem, _job(run.id, view.record.job), run.id)


def _job(run_id: str, tree: dict[str, object]) -> Job:
    try:
        return JOB.validate_python(tree)
    except ValidationError as error:
        raise JobError(explain(f"job of run {run_id}", error)) from error
