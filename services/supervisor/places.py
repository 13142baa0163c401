"""The place of each run in the queue, from what a pass found out about it."""

from collections.abc import Iterable, Mapping

from services.supervisor.claims import Claims
from services.supervisor.decisions import End, Look, Wait
from services.supervisor.queue import entered
from volley.state import ENDED, Place


def place_of(look: Look, before: Place | None, claims: Claims, now: float) -> Place | None:
    """Return the run's place before others move it; None if the run has ended.

    Args:
        before: its place after the last pass.
    """
    if isinstance(look.action, End) or (isinstance(look.action, Wait) and look.action.settled):
        return None
    resources, most = claims.of(look.record, look.desired, look.workers)
    fields = {"priority": look.desired.priority, "resources": resources, "most": most}
    if before is None:
        return _new(look, fields, now)
    place = before.model_copy(update=fields)
    if place.state == "stopping" and look.job != "alive":
        return entered(place, "waiting", now)
    if place.state == "waiting" and look.job == "alive":
        return entered(place, "admitted", now)
    return place


def _new(look: Look, fields: Mapping[str, object], now: float) -> Place:
    """Return the place of a run that is submitted, resumed, or older than the queue."""
    record, observed = look.record, look.observed
    live = look.job == "alive" or (observed.state != "queued" and observed.state not in ENDED)
    resumed = look.history.resumed_by_user(look.desired, observed)
    return Place.model_validate(
        {
            "run": record.id,
            "owner": record.owner,
            "submitted": now if resumed else record.created,
            "state": "admitted" if live else "waiting",
            "since": now,
            **fields,
        }
    )


def preemptions(before: Mapping[str, Place], after: Iterable[Place]) -> dict[str, str]:
    """Return the runs that are preempted from now on, each with the run that preempts it."""
    return {
        place.run: place.preempted_by
        for place in after
        if place.state == "stopping" and (place.run not in before or before[place.run].state != "stopping")
    }
