"""Live views as server-sent events. The dashboard reads them with fetch, because EventSource cannot send a token."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header

from services.api.auth import READ, SentToken
from services.api.context import Ctx, RunPath
from services.api.openapi import problems
from services.api.sse import EventStream

read = APIRouter(prefix="/v1", tags=["live"], dependencies=[READ])

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "an endless stream of events",
    }
}


@read.get("/runs/{run_id}/live", status_code=200, response_class=EventStream, responses={**EVENTS, **problems(404)})
async def watch_run(
    run_id: RunPath,
    context: Ctx,
    token: SentToken,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=200)] = None,
) -> EventStream:
    """Stream what happens in a run from now on, or after the event `Last-Event-ID`.

    Events: `observed` {desired, observed, state}, first and on every change; `metrics` {rows}; `events` {items};
    `evaluations` {items}; `ended` {state}, once the run has ended and all before it was sent; `deleted`. A client can
    resume after any event that has an id. The stream ends when the token is revoked.
    """
    await context.exists(run_id)
    return EventStream(context.live.run(run_id, last_event_id), partial(context.tokens.until_revoked, token))


@read.get("/live", status_code=200, response_class=EventStream, responses=EVENTS)
async def watch_runs(context: Ctx, token: SentToken) -> EventStream:
    """Stream `runs` {items}: the newest 200 runs, at once and whenever one of them changes, at most every second."""
    return EventStream(context.live.runs(), partial(context.tokens.until_revoked, token))
