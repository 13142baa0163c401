"""Live views, as server-sent events. A browser reads them with fetch, which sends the token."""

from typing import Annotated, Any

from fastapi import APIRouter, Header

from services.api.auth import READ
from services.api.context import Ctx, RunPath
from services.api.openapi import problems
from services.api.sse import EventStream

read = APIRouter(prefix="/v1", tags=["live"], dependencies=[READ])

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "events, for ever"}
}


@read.get("/runs/{run_id}/live", status_code=200, response_class=EventStream, responses={**EVENTS, **problems(404)})
async def watch_run(
    run_id: RunPath,
    context: Ctx,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=200)] = None,
) -> EventStream:
    """What happens in a run from now on, or from the event `Last-Event-ID` on.

    `observed` {desired, observed, state}, first and at each change; `metrics` {rows}; `events` {items};
    `evaluations` {items}; `deleted`. Those that carry an id can be resumed from.
    """
    await context.exists(run_id)
    return EventStream(context.live.run(run_id, last_event_id))


@read.get("/live", status_code=200, response_class=EventStream, responses=EVENTS)
async def watch_runs(context: Ctx) -> EventStream:
    """`runs` {items}: the newest 200, first and whenever one of them changes, at most once a second."""
    return EventStream(context.live.runs())
