"""Routes about who uses the cluster: the queue, and the audit of who changed what."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.api.auth import ADMIN, READ
from services.api.context import Ctx
from services.api.routes.answers import as_json
from volley.state import Limits, Place
from volley.views import AuditPage, AuditView, EntryId, OwnerView, QueueView, RunId, TokenName

read = APIRouter(prefix="/v1", tags=["queue"], dependencies=[READ])
admin = APIRouter(prefix="/v1", tags=["queue"], dependencies=[ADMIN])

AT_ONCE = 1000  # audit records read in one round trip


@read.get("/queue", response_model=QueueView)
async def get_queue(context: Ctx) -> Response:
    """The runs that hold resources, those that wait and why, and what each owner holds."""
    places, limits = await context.store.places(unreadable={}), await context.store.limits()
    items = sorted(places.values(), key=lambda each: (each.position or 0, each.since, each.run))
    return as_json(QueueView.model_construct(items=items, owners=owners(items, limits)))


def owners(places: Iterable[Place], limits: Mapping[str, Limits]) -> list[OwnerView]:
    """Return what the runs of each owner hold; owners whose runs all wait hold nothing."""
    by_owner: dict[str, list[Place]] = {}
    for place in places:
        by_owner.setdefault(place.owner, []).extend([place] if place.state != "waiting" else [])
    return [
        OwnerView(
            name=owner,
            runs=len(held),
            cpus=sum(place.resources.get("CPU", 0.0) for place in held),
            gpus=sum(place.resources.get("GPU", 0.0) for place in held),
            limits=limits.get(owner, Limits()),
        )
        for owner, held in sorted(by_owner.items())
    ]


@admin.get("/audit", response_model=AuditPage)
async def get_audit(
    context: Ctx,
    run: Annotated[RunId | None, Query(description="only changes of this run")] = None,
    who: Annotated[TokenName | None, Query(description="only changes by this token")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    before: Annotated[EntryId | None, Query(description="`next` of the previous page")] = None,
) -> Response:
    """Who changed what, newest first: submissions, changes, stops, resumptions and deletions of runs, and tokens."""
    found: list[AuditView] = []
    while len(found) <= limit:
        records = await context.store.audit(AT_ONCE, before)
        for name, record in records:
            if run in (None, record.run) and who in (None, record.who):
                found.append(AuditView(id=name, **record.model_dump()))
        if len(records) < AT_ONCE:
            break
        before = records[-1][0]
    more = found[limit - 1].id if len(found) > limit else None
    return as_json(AuditPage(items=found[:limit], next=more))
