"""The queue: which run starts next, why the others wait, and which runs stop for one of higher priority.

    waiting ──> admitted ──> ended
       ^            │  a run of higher priority needs what it holds
       └─ stopping <┘  at a checkpoint

Runs are admitted by priority, then by time of submission, as far as the cluster and the quotas of their owners reach.
Three rules keep every run from starving:

- A unit of priority counts as an hour of waiting, so a run is overtaken only by runs that were submitted less than
  20 hours after it (`AGING_SECONDS`, `MAX_PRIORITY`).
- A run further back that fits may start first, but only until the run before it has waited for an hour
  (`PATIENCE_SECONDS`).
- A run that was preempted and has started again runs for an hour before it can be preempted again
  (`PROTECTED_SECONDS`).

A run that needs more than the whole cluster, that its nodes cannot hold, or that needs more than the whole quota of
its owner, delays no other.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from volley.state import Limits, Place, PlaceState

AGING_SECONDS = 3600.0
PATIENCE_SECONDS = 3600.0
PROTECTED_SECONDS = 3600.0
ROUNDING = 1e-6
HOLDERS_SHOWN = 2
UNLIMITED = Limits()

Amounts = Mapping[str, float]  # by Ray's resource name


def rank(place: Place) -> tuple[float, float, str]:
    """Return the sort key of a run that waits; the lowest comes first."""
    return place.submitted - AGING_SECONDS * place.priority, place.submitted, place.run


def plan(
    places: Iterable[Place],
    cluster: Amounts | None,
    limits: Mapping[str, Limits],
    now: float,
    misfits: Mapping[str, str] = MappingProxyType({}),
) -> list[Place]:
    """Return the places as they should be now: runs that fit are admitted, and the rest have a position and a reason.

    Args:
        cluster: resources of the whole cluster; None if it adds nodes when they are needed.
        limits: by owner; an owner without limits may use everything.
        now: seconds since 1970.
        misfits: by run, why its processes never fit on the cluster's nodes; see `services.supervisor.fit`.
    """
    places = list(places)
    turn = _Turn(cluster, limits, now, misfits, {place.run: place for place in places if place.state != "waiting"})
    waiting = [turn.take(place) for place in sorted(places, key=rank) if place.state == "waiting"]
    left = [place for place in waiting if place is not None]
    numbered = [place.model_copy(update={"position": number}) for number, place in enumerate(left, start=1)]
    return [*turn.held.values(), *numbered]


def total(nodes: Iterable[Amounts]) -> dict[str, float]:
    """Return the resources of all nodes together."""
    found = list(nodes)
    return {
        name: sum(node.get(name, 0.0) for node in found) for name in sorted({name for node in found for name in node})
    }


def entered(place: Place, state: PlaceState, now: float) -> Place:
    """Return ``place`` in a state that begins now."""
    return place.model_copy(update={"state": state, "since": now, "position": None, "reason": ""})


def sentence(place: Place) -> str:
    """Say in one sentence where a run stands and why it waits."""
    preempted = f"preempted by {place.preempted_by}; " if place.preempted_by else ""
    return f"{preempted}place {place.position} in the queue: {place.reason}"


def named(place: Place) -> str:
    """Return the run with its owner, as in ``alice's sevens-1``."""
    return f"{place.owner}'s {place.run}" if place.owner else place.run


def amount(value: float, name: str) -> str:
    """Format an amount of a resource, as in ``2 CPUs``."""
    return f"{value:g} {name}{'s' if name in ('CPU', 'GPU') and value != 1 else ''}"


class _Turn:
    """One pass over the runs that wait, in their order.

    Attributes:
        held: runs that hold resources, by id; those that stop for another hold them until they have ended.
    """

    def __init__(
        self,
        cluster: Amounts | None,
        limits: Mapping[str, Limits],
        now: float,
        misfits: Mapping[str, str],
        held: dict[str, Place],
    ) -> None:
        self.held = held
        self._misfits = misfits
        self._cluster, self._limits, self._now = cluster, limits, now
        self._next: list[Place] = []  # runs that start once others have stopped
        self._blocker: Place | None = None  # what nothing behind it may overtake
        self._blockers: dict[str, Place] = {}  # the same among the runs of an owner, if it waits for the owner's quota

    def take(self, place: Place) -> Place | None:
        """Admit the run, or return its place with the reason why it waits."""
        reason = self._obstacle(place)
        if not reason:
            self.held[place.run] = entered(place, "admitted", self._now)
            return None
        return place.model_copy(update={"reason": reason})

    def _obstacle(self, place: Place) -> str:
        if reason := self._never_fits(place):
            return reason
        if ahead := self._blockers.get(place.owner):
            return f"waits behind {named(ahead)}, which has waited for the quota for over an hour"
        if reason := self._over_quota(place):
            if self._waited_long(place):
                self._blockers[place.owner] = place
            return reason
        if self._blocker is not None:
            return f"waits behind {named(self._blocker)}, which has waited for over an hour"
        if self._fits(place.resources):
            return ""
        if not self._fits(place.resources, without=self._stopping()):
            victims = self._victims(place)
            if not victims:
                self._blocker = place if self._waited_long(place) else None
                return self._lacking(place)
            for victim in victims:
                stopping = entered(victim, "stopping", self._now)
                self.held[victim.run] = stopping.model_copy(update={"preempted_by": place.run})
        self._next.append(place)
        return f"waits for a checkpoint of {', '.join(named(each) for each in self._stopping())}"

    def _never_fits(self, place: Place) -> str:
        """Say what the run needs that nobody else's end would give it."""
        if self._cluster is not None:
            for name, needed in place.resources.items():
                whole = self._cluster.get(name, 0.0)
                if needed > whole + ROUNDING:
                    return f"needs {amount(needed, name)}, and the cluster has {whole:g}"
        if reason := self._misfits.get(place.run):
            return reason
        return beyond_quota(place.owner, self._limits.get(place.owner, UNLIMITED), place.most)

    def _over_quota(self, place: Place) -> str:
        limits = self._limits.get(place.owner, UNLIMITED)
        theirs = [each for each in (*self.held.values(), *self._next) if each.owner == place.owner]
        if limits.runs is not None and len(theirs) >= limits.runs:
            return f"quota: {place.owner} runs {len(theirs)} of {limits.runs}"
        for name, limit in quotas(limits).items():
            held, needed = _sum(theirs, name, most=True), place.most.get(name, 0.0)
            if needed and held + needed > limit + ROUNDING:
                return f"quota: {place.owner} holds {held:g} of {amount(limit, name)}, and this run needs {needed:g}"
        return ""

    def _waited_long(self, place: Place) -> bool:
        return self._now - place.since >= PATIENCE_SECONDS

    def _stopping(self) -> list[Place]:
        return [each for each in self.held.values() if each.state == "stopping"]

    def _free(self, name: str, without: Iterable[Place] = ()) -> float:
        """Return how much of a resource is left for others once ``without`` have ended."""
        whole = math.inf if self._cluster is None else self._cluster.get(name, 0.0)
        return whole - _sum(self.held.values(), name) - _sum(self._next, name) + _sum(without, name)

    def _fits(self, resources: Amounts, without: Iterable[Place] = ()) -> bool:
        leaving = list(without)
        return all(needed <= self._free(name, leaving) + ROUNDING for name, needed in resources.items() if needed)

    def _victims(self, place: Place) -> list[Place]:
        """Return the runs to preempt: of the lowest priority, the newest first, and no more than needed.

        The list is empty if preempting all runs of lower priority would not suffice.
        """
        leaving = self._stopping()
        candidates = [each for each in self.held.values() if each.priority < place.priority and self._may_stop(each)]
        chosen: list[Place] = []
        for candidate in sorted(candidates, key=lambda each: (each.priority, -each.submitted)):
            chosen.append(candidate)
            if self._fits(place.resources, [*leaving, *chosen]):
                break
        else:
            return []
        for spared in reversed(chosen):
            rest = [each for each in chosen if each is not spared]
            if self._fits(place.resources, [*leaving, *rest]):
                chosen = rest
        return chosen

    def _may_stop(self, place: Place) -> bool:
        protected = place.preempted_by and self._now - place.since < PROTECTED_SECONDS
        return place.state == "admitted" and not protected

    def _lacking(self, place: Place) -> str:
        """Say what the run waits for, and who holds most of it."""
        lacking = {
            name: min(needed, needed - self._free(name))
            for name, needed in place.resources.items()
            if needed > self._free(name) + ROUNDING
        }
        waits = " and ".join(amount(value, name) for name, value in lacking.items())
        name = next(iter(lacking))
        holders = sorted(self.held.values(), key=lambda one: (-one.resources.get(name, 0.0), one.submitted, one.run))
        holds = [f"{named(each)} holds {each.resources[name]:g}" for each in holders if each.resources.get(name)]
        more = f" and {len(holds) - HOLDERS_SHOWN} more" if len(holds) > HOLDERS_SHOWN else ""
        return f"waits for {waits}: {', '.join(holds[:HOLDERS_SHOWN]) or 'runs before it need them'}{more}"


def beyond_quota(owner: str, limits: Limits, most: Amounts) -> str:
    """Say how a run alone would exceed its owner's quota; "" if it would not.

    Args:
        most: the most that the run may reserve.
    """
    if limits.runs == 0:
        return f"{owner} may not run anything: its quota is 0 runs"
    for name, limit in quotas(limits).items():
        if most.get(name, 0.0) > limit + ROUNDING:
            return f"needs {amount(most[name], name)}, and the quota of {owner} is {limit:g}"
    return ""


def quotas(limits: Limits) -> dict[str, float]:
    """Return the limits on resources by Ray's name, without those that are unlimited."""
    return {name: limit for name, limit in (("CPU", limits.cpus), ("GPU", limits.gpus)) if limit is not None}


def _sum(places: Iterable[Place], name: str, *, most: bool = False) -> float:
    return sum((each.most if most else each.resources).get(name, 0.0) for each in places)
