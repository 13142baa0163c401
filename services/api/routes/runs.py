"""Runs: made, listed, looked at, changed, stopped, resumed, deleted."""

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

from services import desired as desired_states
from services.api import jobs
from services.api.auth import ADMIN, OPERATE, READ
from services.api.context import Context, Ctx, RunPath
from services.api.index import Filter, seen_state
from services.api.openapi import problems
from services.api.problems import FieldProblem, Problem
from services.api.routes.answers import as_json
from services.api.schemas import (
    Changes,
    Checked,
    ExportView,
    ExportWish,
    JobToCheck,
    NewRun,
    RunPage,
    RunView,
    SeenState,
)
from services.job_file import Job
from services.state import ENDED, Desired, Observed, RunRecord
from volley.errors import JobError

read = APIRouter(prefix="/v1", tags=["runs"], dependencies=[READ])
operate = APIRouter(prefix="/v1", tags=["runs"], dependencies=[OPERATE])
admin = APIRouter(prefix="/v1", tags=["runs"], dependencies=[ADMIN])

_Key = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,200}$")]
_Revision = Annotated[str, StringConstraints(pattern=r'^(\*|"?[0-9]{1,15}"?)$')]
IdempotencyKey = Annotated[_Key | None, Header(alias="Idempotency-Key")]
IfMatch = Annotated[_Revision | None, Header(alias="If-Match")]
TAG = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}=[^\x00]{0,200}$"


@operate.post("/runs", status_code=201, response_model=RunView, responses={200: {"model": RunView}, **problems(409)})
async def create_run(wanted: NewRun, context: Ctx, idempotency_key: IdempotencyKey = None) -> Response:
    """Make a run. It starts as soon as the cluster has room.

    With an `Idempotency-Key` the same request may be sent again: it is answered with the run it made (200).
    """
    body = _digest(wanted)
    async with _one_at_a_time(context, idempotency_key):
        try:
            # Before the job is checked, which may take longer than a client waits before it asks again.
            run_id = await context.store.made(idempotency_key, body) if idempotency_key else None
            if run_id is not None:
                return await _made(run_id, 200, context)
            record = _record(await _checked(wanted.job, context), wanted.tags, context)
            run_id = await context.store.create(record, key=idempotency_key, body=body)
        except JobError as error:
            raise Problem(409, "idempotency-key-used", str(error)) from error
    context.index.changed()
    return await _made(run_id, 201 if run_id == record.id else 200, context)


async def _made(run_id: str, status: int, context: Context) -> Response:
    return _answer(*await context.look(run_id), status=status, headers={"Location": f"/v1/runs/{run_id}"})


@read.get("/runs", response_model=RunPage)
async def list_runs(
    context: Ctx,
    state: SeenState | None = None,
    kind: Annotated[str | None, Query(max_length=64)] = None,
    name: Annotated[str | None, Query(max_length=64, description="a part of it")] = None,
    tag: Annotated[
        list[Annotated[str, StringConstraints(pattern=TAG)]] | None,
        Query(description="KEY=VALUE; several are all to hold", max_length=32),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=400, description="`next` of the page before")] = None,
) -> Response:
    """Runs, newest first."""
    tags = tuple((key, value) for key, _, value in (each.partition("=") for each in tag or ()))
    return as_json(await context.index.page(Filter(state, kind, name, tags), limit=limit, cursor=cursor))


@read.get("/runs/{run_id}", response_model=RunView, responses=problems(404))
async def get_run(run_id: RunPath, context: Ctx) -> Response:
    """A run: what was asked for, what is desired of it, how it stands."""
    return _answer(*await context.look(run_id))


@operate.patch("/runs/{run_id}", response_model=RunView, responses=problems(404, 409, 412))
async def change_run(run_id: RunPath, wanted: Changes, context: Ctx, if_match: IfMatch = None) -> Response:
    """Change a live run. Its driver takes the change up within seconds; `observed.revision` says when.

    `If-Match` with the revision in an earlier answer's `ETag` refuses the change where somebody was quicker.
    """
    record, _, observed = await context.look(run_id)
    check_changeable(observed)
    changes = wanted.model_dump(include=wanted.model_fields_set)
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

    return await _desire(run_id, context, change)


def check_changeable(observed: Observed) -> None:
    """Raises `Problem` 409 for a run that has ended."""
    if observed.state in ENDED:
        advice = "it can not be changed any more" if observed.state == "done" else "resume it first"
        raise Problem(409, "run-has-ended", f"the run is {observed.state}: {advice}")


@operate.post("/runs/{run_id}/stop", status_code=202, response_model=RunView, responses=problems(404))
async def stop_run(run_id: RunPath, context: Ctx) -> Response:
    """Let the run write a checkpoint and end. One that has ended stays as it is."""
    record, desired, observed = await context.look(run_id)
    if desired.stopped or observed.state in ENDED:
        return _answer(record, desired, observed, status=202)
    return await _desire(run_id, context, lambda current: current.model_copy(update={"stopped": True}), status=202)


@operate.post("/runs/{run_id}/resume", status_code=202, response_model=RunView, responses=problems(404, 409))
async def resume_run(run_id: RunPath, context: Ctx) -> Response:
    """Go on with a run that is paused, stopped or failed, from its newest checkpoint."""
    _, _, observed = await context.look(run_id)
    if observed.state == "done":
        raise Problem(409, "run-has-ended", "the run is done: there is nothing left of it to resume")
    go_on = {"stopped": False, "paused": False}
    return await _desire(run_id, context, lambda current: current.model_copy(update=go_on), status=202)


@operate.post("/runs/{run_id}/export", status_code=202, response_model=ExportView, responses=problems(404, 409))
async def export_run(run_id: RunPath, context: Ctx, wanted: ExportWish | None = None) -> Response:
    """Where the run's model lies, or a checkpoint of it that `volley export` makes one from. Nothing is copied."""
    record, _, observed = await context.look(run_id)
    if record.kind == "eval":
        raise Problem(409, "no-model", "an evaluation makes no model")
    folder, step = Path(record.folder), wanted.checkpoint if wanted else None
    if step is None and observed.state != "done":
        step = await asyncio.to_thread(_newest_checkpoint, folder)
    path = folder / "model" if step is None else folder / "checkpoints" / f"step-{step}"
    ready = await asyncio.to_thread(path.is_dir)
    return as_json(ExportView(run=run_id, checkpoint=step, path=str(path), ready=ready), 202)


@admin.delete("/runs/{run_id}", status_code=204, responses=problems(404, 409))
async def delete_run(run_id: RunPath, context: Ctx) -> Response:
    """Forget a run that has ended. Its folder stays."""
    _, _, observed = await context.look(run_id)
    if observed.state not in ENDED:
        raise Problem(409, "run-is-live", f"the run is {seen_state(observed)}: stop it first")
    await context.store.delete(run_id)
    context.forget(run_id)
    return Response(status_code=204)


@operate.post("/jobs/check", response_model=Checked, tags=["jobs"])
async def check_job(wanted: JobToCheck, context: Ctx) -> Response:
    """Would this job be taken? 422 says why not, as `volley check` does."""
    await _checked(wanted.job, context)
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
    """Two requests with one key at once are one after the other."""
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


def _record(job: Job, tags: dict[str, str], context: Context) -> RunRecord:
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
    )


def _digest(wanted: NewRun) -> str:
    return hashlib.sha256(json.dumps(wanted.model_dump(), sort_keys=True).encode()).hexdigest()


def _check_revision(if_match: str | None, revision: int) -> None:
    if if_match not in (None, "*") and int(str(if_match).strip('"')) != revision:
        raise Problem(412, "changed-meanwhile", f"the revision is {revision}, not {if_match}: look at the run again")


async def _desire(
    run_id: str, context: Context, change: Callable[[Desired], Desired], *, status: int = 200
) -> Response:
    await context.store.change_desired(run_id, change)
    context.index.changed()
    return _answer(*await context.look(run_id), status=status)


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
