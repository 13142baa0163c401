"""Routes for the data of a run: metrics, events, ledger, samples, evaluations, timeline, logs."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi import Path as PathParameter
from fastapi.responses import PlainTextResponse

from services.api.auth import READ
from services.api.context import Ctx, RunPath
from services.api.index import CURSOR_HINT, cursor_of, place_of
from services.api.openapi import problems
from services.api.problems import Problem
from services.api.routes.answers import as_json, raw_json
from services.api.samples import SampleCard, entry_order
from services.store.logs import DRIVER, NAME, Piece, log_files, read_log
from volley.views import (
    EntryId,
    EventPage,
    LedgerView,
    LogFile,
    LogList,
    Rows,
    SamplePage,
    Series,
)

read = APIRouter(prefix="/v1/runs/{run_id}", tags=["data"], dependencies=[READ], responses=problems(404, 409))

Step = Annotated[int, Query(ge=0, le=1 << 53)]
SCANNED = 5000  # events read for one page if a kind is given


@read.get("/metrics", response_model=Series)
async def get_metrics(
    run_id: RunPath,
    context: Ctx,
    names: Annotated[str | None, Query(max_length=10_000, description="separated by commas; all if omitted")] = None,
    from_: Annotated[Step | None, Query(alias="from", description="first step")] = None,
    to: Annotated[Step | None, Query(description="last step")] = None,
    points: Annotated[int, Query(ge=1, le=5000, description="most points; more rows are averaged in buckets")] = 1000,
) -> Response:
    """Metrics by step, as columns. docs/metrics.md explains each metric."""
    await context.exists(run_id)
    chosen = None if names is None else list(dict.fromkeys(filter(None, names.split(","))))
    return as_json(await context.series.answer(run_id, chosen, from_, to, points))


@read.get("/events", response_model=EventPage)
async def list_events(
    run_id: RunPath,
    context: Ctx,
    after: Annotated[EntryId | None, Query(description="id of the last event the client has")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    kind: Annotated[str | None, Query(max_length=64)] = None,
    newest: Annotated[bool, Query(description="return the last `limit` events instead of the first")] = False,
) -> Response:
    """Events, oldest first. A page may contain fewer than `limit` events even if `next` is not null."""
    await context.exists(run_id)
    count = limit if kind is None else SCANNED
    if newest:
        entries = await context.store.newest(run_id, "events", count)
    else:
        entries = await context.store.entries(run_id, "events", after=after, count=count)
    items = [{**row, "id": name} for name, row in entries if kind is None or row.get("kind") == kind]
    more = entries[-1][0] if len(entries) == count and not newest else None
    if len(items) > limit:
        items = items[-limit:] if newest else items[:limit]
        more = None if newest else items[-1]["id"]
    return raw_json({"items": items, "next": more})


@read.get("/ledger", response_model=LedgerView)
async def get_ledger(run_id: RunPath, context: Ctx) -> Response:
    """Numbers of groups admitted, trained on, dropped (by reason) and in flight."""
    await context.exists(run_id)
    return as_json(LedgerView(counts=await context.store.ledger(run_id)))


@read.get("/samples", response_model=SamplePage)
async def list_samples(
    run_id: RunPath,
    context: Ctx,
    step: Step | None = None,
    group: Annotated[int | None, Query(ge=-(1 << 53), le=1 << 53)] = None,
    status: Annotated[str | None, Query(max_length=64, description="status of the verdict, such as passed")] = None,
    prompt_id: Annotated[str | None, Query(max_length=1000)] = None,
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=400, description="`next` of the previous page")] = None,
) -> Response:
    """The run's excerpt of samples: newest step first, within a step group by group, best reward first."""
    await context.exists(run_id)

    def matches(card: SampleCard) -> bool:
        return (
            (step is None or card.step == step)
            and (group is None or card.group == group)
            and (status is None or card.status == status)
            and (prompt_id is None or card.prompt_id == prompt_id)
            and (min_reward is None or (card.reward is not None and card.reward >= min_reward))
        )

    entries, more = await context.samples.page(run_id, matches, limit=limit, after=_place(cursor))
    items = [{**row, "id": name} for name, row in entries]
    return raw_json({"items": items, "next": None if more is None else cursor_of(more)})


@read.get("/evaluations", response_model=Rows)
async def list_evaluations(run_id: RunPath, context: Ctx) -> Response:
    """Evaluations on held-out prompts, by version. Of several for one version, only the last is returned."""
    await context.exists(run_id)
    entries = await context.store.entries(run_id, "evaluations")
    return raw_json({"items": latest([row for _, row in entries], "version")})


@read.get("/timeline", response_model=Rows)
async def get_timeline(
    run_id: RunPath, context: Ctx, steps: Annotated[int, Query(ge=1, le=500, description="newest steps")] = 20
) -> Response:
    """What each process did when: spans of (process, stage, start, end) per step, newest last."""
    await context.exists(run_id)
    entries = await context.store.newest(run_id, "timeline", steps)
    return raw_json({"items": latest([row for _, row in entries], "step")})


@read.get("/logs", response_model=LogList)
async def list_logs(run_id: RunPath, context: Ctx) -> Response:
    """The processes that have a log."""
    record, _, _ = await context.find_run(run_id)
    found = await asyncio.to_thread(log_files, Path(record.folder))
    files = [LogFile(process=file.process, bytes=file.bytes) for file in found]
    if context.launcher is not None and all(file.process != DRIVER for file in files):
        files = [LogFile(process=DRIVER, bytes=None), *files]
    return as_json(LogList(items=files))


@read.get("/logs/{process}", response_class=PlainTextResponse)
async def get_log(
    run_id: RunPath,
    process: Annotated[str, PathParameter(pattern=NAME)],
    context: Ctx,
    tail_: Annotated[int, Query(alias="tail", ge=1, le=1 << 20, description="most bytes")] = 65536,
    offset: Annotated[
        int | None, Query(ge=0, lt=1 << 62, description="byte to begin at; omitted: the log's end")
    ] = None,
) -> Response:
    """The end of a process's log, or the part after `offset`. The header `X-Next-Offset` is the next `offset`."""
    record, _, _ = await context.find_run(run_id)
    piece = await asyncio.to_thread(read_log, Path(record.folder), process, tail_, offset)
    if piece is None and process == DRIVER and context.launcher is not None:
        # Ray's copy has no offsets: it is returned once, and the driver's own log, when it appears, begins at 0.
        piece = Piece("" if offset is not None else await context.launcher.logs(run_id, tail_), 0)
    if piece is None:
        raise Problem(404, "no-such-log", f"there is no log of {process} that this server can see")
    return PlainTextResponse(piece.text, headers={"X-Next-Offset": str(piece.next)})


def latest(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Drop the rows that a resumed run wrote again: a row replaces all earlier rows whose ``key`` is not smaller."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1].get(key, 0) >= row.get(key, 0):
            kept.pop()
        kept.append(row)
    return kept


def _place(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    step, name = place_of(cursor)
    try:
        entry_order(name)
        return int(step), name
    except (ValueError, OverflowError) as error:
        raise Problem(422, "invalid-request", f"query/cursor: {CURSOR_HINT}") from error
