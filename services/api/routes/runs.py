"""Routes that create, list, read, change, stop, resume, export and delete runs."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from pydantic import StringConstraints

from services.api import jobs
from services.api.auth import ADMIN, OPERATE, READ, Principal, Sender
from services.api.context import Context, Ctx, RunPath
from services.api.index import Filter, seen_state
from services.api.openapi import problems
from services.api.problems import FieldProblem, Problem
from services.api.quotas import check_priority, check_quota, check_scale
from services.api.routes.answers import as_json
from services.jobs.job_file import Job
from services.store import desired as desired_states
from services.supervisor.claims import ROLES
from volley.errors import JobError
from volley.patterns import KEY, REVISION, TAG
from volley.state import ENDED, AuditRecord, Desired, Observed, RunRecord
from volley.views import (
    Changes,
    Checked,
    ExportRequest,
    ExportView,
    JobToCheck,
    NewRun,
    RunPage,
    RunView,
    SeenState,
)

read = APIRouter(prefix="/v1", tags=["runs"], dependencies=[READ])
operate = APIRouter(prefix="/v1", tags=["runs"], dependencies=[OPERATE])
admin = APIRouter(prefix="/v1", tags=["runs"], dependencies=[ADMIN])

_Key = Annotated[str, StringConstraints(pattern=KEY)]
_Revision = Annotated[str, StringConstraints(pattern=REVISION)]
IdempotencyKey = Annotated[_Key | None, Header(alias="Idempotency-Key")]
IfMatch = Annotated[_Revision | None, Header(alias="If-Match")]


@operate.post("/runs", status_code=201, response_model=RunView, responses={200: {"model": RunView}, **problems(409)})
async def create_run(body: NewRun, context: Ctx, sender: Sender, idempotency_key: IdempotencyKey = None) -> Response:
    """Create a run. It starts when its turn in the queue has come; see `/v1/queue`.

    With an `Idempotency-Key`, the same request can be repeated safely: it returns the run created first, with 200.
    """
    check_priority(body.priority, sender)
    digest, desired = _digest(body), Desired(priority=body.priority)
    async with _one_at_a_time(context, idempotency_key):
        try:
            # Look before the check of the job, which may take longer than a client waits before it retries.
            run_id = await context.store.run_of_key(idempotency_key, digest) if idempotency_key else None
            if run_id is not None:
                return await _location_answer(run_id, 200, context)
            job = await _checked(body.job, context)
            check_quota(job, sender)
            record = _record(job, body.tags, sender, context)
            audit = sender.audit("submit", name=record.name, kind=record.kind, priority=body.priority)
            run_id = await context.store.create(record, desired, key=idempotency_key, body=digest, audit=audit)
        except JobError as error:
            raise Problem(409, "idempotency-key-used", str(error)) from error
    context.index.changed()
    return await _location_answer(run_id, 201 if run_id == record.id else 200, context)


async def _location_answer(run_id: str, status: int, context: Context) -> Response:
    return _answer(*await context.find_run(run_id), status=status, headers={"Location": f"/v1/runs/{run_id}"})


@read.get("/runs", response_model=RunPage)
async def list_runs(
    context: Ctx,
    state: SeenState | None = None,
    kind: Annotated[str | None, Query(max_length=64)] = None,
    name: Annotated[str | None, Query(max_length=64, description="part of the name")] = None,
    tag: Annotated[
        list[Annotated[str, StringConstraints(pattern=TAG)]] | None,
        Query(description="KEY=VALUE; a run must match all of several", max_length=32),
    ] = None,
    id_prefix: Annotated[str | None, Query(max_length=128, description="beginning of the id")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=400, description="`next` of the previous page")] = None,
) -> Response:
    """Runs, newest first."""
    tags = tuple((key, value) for key, _, value in (each.partition("=") for each in tag or ()))
    return as_json(await context.index.page(Filter(state, kind, name, tags, id_prefix), limit=limit, cursor=cursor))


@read.get("/runs/{run_id}", response_model=RunView, responses=problems(404, 409))
async def get_run(run_id: RunPath, context: Ctx) -> Response:
    """A run: its record, its desired state and its observed state."""
    return _answer(*await context.find_run(run_id))


@operate.patch("/runs/{run_id}", response_model=RunView, responses=problems(404, 409, 412))
async def change_run(
    run_id: RunPath, body: Changes, context: Ctx, sender: Sender, if_match: IfMatch = None
) -> Response:
    """Change a live run. Its driver applies the change within seconds; `observed.revision` shows when it has.

    With `If-Match`, set to the `ETag` of an earlier response, the change is rejected if somebody else changed the run
    since.
    """
    record, _, observed = await context.find_run(run_id)
    check_changeable(observed)
    changes = body.model_dump(include=body.model_fields_set)
    if not changes:
        raise Problem(422, "invalid-request", f"name what to change: {', '.join(Changes.model_fields)}")
    job = context.job(record)

    def change(current: Desired) -> Desired:
        _check_revision(if_match, current.revision)
        fields = dict(changes)
        if "objective" in fields and fields["objective"] is None:
            current = current.model_copy(update={"objective": {}})
            del fields["objective"]
        try:
            return desired_states.change(current, job, fields)
        except JobError as error:
            errors = [FieldProblem(pointer=f"/{name}", detail=str(error)) for name in changes if len(changes) == 1]
            raise Problem(422, "change-not-possible", str(error), errors=errors) from error

    def permitted(current: Desired) -> Desired:
        changed = change(current)
        if changed.priority > current.priority:
            check_priority(changed.priority, sender)
        return changed

    audit = sender.audit("set", run_id, **changes)
    if not changes.keys() & ROLES:
        return await _desire(run_id, context, permitted, audit)
    async with context.scaling[record.owner]:  # two changes through this server might fit the quota only one by one
        await check_scale(record, job, permitted(await context.store.desired(run_id)), context)
        return await _desire(run_id, context, permitted, audit)


def check_changeable(observed: Observed) -> None:
    """Raise `Problem` 409 for a run that has ended."""
    if observed.state in ENDED:
        advice = "it cannot be changed any more" if observed.state == "done" else "resume it first"
        raise Problem(409, "run-has-ended", f"the run is {observed.state}: {advice}")


@operate.post("/runs/{run_id}/stop", status_code=202, response_model=RunView, responses=problems(404, 409))
async def stop_run(run_id: RunPath, context: Ctx, sender: Sender) -> Response:
    """Make the run write a checkpoint and end. A run that has already ended is not changed."""
    record, desired, observed = await context.find_run(run_id)
    if desired.stopped or observed.state in ENDED:
        return _answer(record, desired, observed, status=202)

    def stopped(current: Desired) -> Desired:
        return current.model_copy(update={"stopped": True})

    return await _desire(run_id, context, stopped, sender.audit("stop", run_id), status=202)


@operate.post("/runs/{run_id}/resume", status_code=202, response_model=RunView, responses=problems(404, 409))
async def resume_run(run_id: RunPath, context: Ctx, sender: Sender) -> Response:
    """Resume a run that is paused, stopped or failed, from its newest checkpoint."""
    _, _, observed = await context.find_run(run_id)
    if observed.state == "done":
        raise Problem(409, "run-has-ended", "the run is done: nothing is left to resume")

    def resumed(current: Desired) -> Desired:
        return current.model_copy(update={"stopped": False, "paused": False})

    return await _desire(run_id, context, resumed, sender.audit("resume", run_id), status=202)


@operate.post("/runs/{run_id}/export", status_code=202, response_model=ExportView, responses=problems(404, 409))
async def export_run(run_id: RunPath, context: Ctx, body: ExportRequest | None = None) -> Response:
    """Return the path of the run's model, or of a checkpoint for `volley export` to convert. Nothing is copied."""
    record, _, observed = await context.find_run(run_id)
    if record.kind == "eval":
        raise Problem(409, "no-model", "an eval run produces no model")
    folder, step = Path(record.folder), body.checkpoint if body else None
    if step is None and observed.state != "done":
        step = await asyncio.to_thread(_newest_checkpoint, folder)
    path = folder / "model" if step is None else folder / "checkpoints" / f"step-{step}"
    ready = await asyncio.to_thread(path.is_dir)
    return as_json(ExportView(run=run_id, checkpoint=step, path=str(path), ready=ready), 202)


@admin.delete("/runs/{run_id}", status_code=204, responses=problems(404, 409))
async def delete_run(run_id: RunPath, context: Ctx, sender: Sender) -> Response:
    """Delete a run that has ended from the service. Its run folder stays."""
    _, _, observed = await context.find_run(run_id)
    if observed.state not in ENDED:
        raise Problem(409, "run-is-live", f"the run is {seen_state(observed)}: stop it first")
    if not await context.store.delete_if(run_id, observed, sender.audit("delete", run_id)):
        await context.find_run(run_id)  # it may be deleted already
        raise Problem(409, "run-is-live", "the run has changed meanwhile: read it again")
    context.forget(run_id)
    return Response(status_code=204)


@operate.post("/jobs/check", response_model=Checked, tags=["jobs"])
async def check_job(body: JobToCheck, context: Ctx) -> Response:
    """Whether this job would be accepted. 422 says why not, like `volley check`."""
    await _checked(body.job, context)
    return as_json(Checked())


async def _checked(tree: dict[str, Any], context: Context) -> Job:
    job = jobs.parse(tree, context.settings)
    if context.checker is not None:
        try:
            await context.checker(job)
        except JobError as error:
            raise Problem(422, "invalid-job", str(error)) from error
    return job


@contextlib.asynccontextmanager
async def _one_at_a_time(context: Context, key: str | None) -> AsyncIterator[None]:
    """Serialise concurrent requests with the same key."""
    if key is None:
        yield
        return
    lock = context.creating.setdefault(key, asyncio.Lock())
    try:
        async with lock:
            yield
    finally:
        if not lock.locked():
            context.creating.pop(key, None)


def _record(job: Job, tags: dict[str, str], sender: Principal, context: Context) -> RunRecord:
    now = time.time()
    run_id = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"
    return RunRecord(
        id=run_id,
        name=job.name,
        kind=job.kind,
        job=job.model_dump(mode="json"),
        created=now,
        folder=os.fspath(context.settings.runs.absolute() / run_id),
        tags=tags,
        owner=sender.owner,
    )


def _digest(body: NewRun) -> str:
    return hashlib.sha256(json.dumps(body.model_dump(), sort_keys=True).encode()).hexdigest()


def _check_revision(if_match: str | None, revision: int) -> None:
    if if_match not in (None, "*") and int(str(if_match).strip('"')) != revision:
        raise Problem(412, "changed-meanwhile", f"the revision is {revision}, not {if_match}: read the run again")


async def _desire(
    run_id: str, context: Context, change: Callable[[Desired], Desired], audit: AuditRecord, *, status: int = 200
) -> Response:
    await context.store.change_desired(run_id, change, audit)
    context.index.changed()
    return _answer(*await context.find_run(run_id), status=status)


def _answer(
    record: RunRecord, desired: Desired, observed: Observed, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    view = RunView.model_construct(record=record, desired=desired, observed=observed, state=seen_state(observed))
    return as_json(view, status, {"ETag": f'"{desired.revision}"', **(headers or {})})


def _newest_checkpoint(folder: Path) -> int | None:
    try:
        names = [path.name for path in (folder / "checkpoints").iterdir()]
    except OSError:
        return None
    return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d{1,12}", name)), default=None)
