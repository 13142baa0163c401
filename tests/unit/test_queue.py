"""The order of the queue: quotas, preemption and the bound on waiting, on generated runs in simulated time."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.supervisor.queue import (
    AGING_SECONDS,
    PATIENCE_SECONDS,
    PROTECTED_SECONDS,
    Amounts,
    entered,
    plan,
    rank,
    sentence,
)
from volley.state import MAX_PRIORITY, Limits, Place

TICK = 1800.0  # seconds of simulated time between two passes
CLUSTER = {"CPU": 8.0, "GPU": 2.0}
OWNERS = ("alice", "bob")


def a_place(run: str, **changes: Any) -> Place:
    """A run that waits for one CPU."""
    resources = changes.pop("resources", {"CPU": 1.0})
    fields = {"run": run, "owner": "", "priority": 0, "submitted": 0.0, "since": 0.0}
    return Place.model_validate({**fields, "resources": resources, "most": resources, **changes})


def held(run: str, **changes: Any) -> Place:
    return a_place(run, state="admitted", **changes)


def planned(
    *places: Place, cluster: Amounts | None = CLUSTER, now: float = 0.0, limits: Mapping[str, Limits] | None = None
) -> dict[str, Place]:
    return {place.run: place for place in plan(places, cluster, limits or {}, now)}


def states(places: Mapping[str, Place]) -> dict[str, str]:
    return {run: place.state for run, place in places.items()}


# ---- one pass, by example ------------------------------------------------------------------------------------------


def test_of_holders_of_equal_amounts_the_one_submitted_first_is_named_first() -> None:
    holders = [held("a", submitted=2), held("b", submitted=1), held("c", submitted=3, resources={"CPU": 6})]
    for order in itertools.permutations(holders):
        reason = planned(a_place("next", submitted=4), *order)["next"].reason
        assert reason.endswith("c holds 6, b holds 1 and 1 more")


def test_runs_start_by_priority_then_by_submission_as_far_as_they_fit() -> None:
    found = planned(
        a_place("late", submitted=2, resources={"CPU": 4}),
        a_place("early", submitted=1, resources={"CPU": 4}),
        a_place("urgent", submitted=3, priority=1, resources={"CPU": 4}),
    )
    assert states(found) == {"late": "waiting", "early": "admitted", "urgent": "admitted"}
    assert (found["late"].position, found["early"].position) == (1, None)


def test_a_run_says_what_it_waits_for_and_who_holds_it() -> None:
    found = planned(
        held("x", owner="alice", resources={"CPU": 6}),
        held("y", owner="bob", resources={"CPU": 1}),
        held("z", resources={"CPU": 1, "GPU": 1}),
        a_place("mine", resources={"CPU": 2}),
    )
    assert sentence(found["mine"]) == (
        "place 1 in the queue: waits for 2 CPUs: alice's x holds 6, bob's y holds 1 and 1 more"
    )


def test_what_never_fits_delays_nobody() -> None:
    found = planned(
        a_place("huge", resources={"CPU": 64}), a_place("b", owner="bob", resources={"CPU": 3}), a_place("c"),
        limits={"bob": Limits(cpus=2)}, now=1e6,
    )  # fmt: skip
    assert states(found) == {"huge": "waiting", "b": "waiting", "c": "admitted"}
    assert found["huge"].reason == "needs 64 CPUs, and the cluster has 8"
    assert found["b"].reason == "needs 3 CPUs, and the quota of bob is 2"


def test_a_cluster_that_grows_admits_what_quotas_allow() -> None:
    found = planned(a_place("huge", resources={"CPU": 64}), cluster=None)
    assert states(found) == {"huge": "admitted"}
    limits = {"bob": Limits(runs=1)}
    found = planned(held("b", owner="bob"), a_place("c", owner="bob"), cluster=None, limits=limits)
    assert found["c"].reason == "quota: bob runs 1 of 1"


def test_a_quota_counts_what_a_run_may_grow_to() -> None:
    growing = held("b", owner="bob", most={"CPU": 3.0})
    found = planned(growing, a_place("c", owner="bob", resources={"CPU": 2}), limits={"bob": Limits(cpus=4)})
    assert found["c"].reason == "quota: bob holds 3 of 4 CPUs, and this run needs 2"


def test_a_run_is_overtaken_for_an_hour_and_not_longer() -> None:
    full, big, small = held("x", resources={"CPU": 6}), a_place("big", resources={"CPU": 4}), a_place("small")
    small = small.model_copy(update={"submitted": 1.0})
    assert planned(full, big, small, now=PATIENCE_SECONDS - 1)["small"].state == "admitted"
    found = planned(full, big, small, now=PATIENCE_SECONDS)
    assert found["small"].reason == "waits behind big, which has waited for over an hour"


def test_a_higher_priority_preempts_the_newest_of_the_lowest_and_starts_once_it_has_stopped() -> None:
    old = held("old", submitted=1, resources={"CPU": 4})
    new = held("new", submitted=2, resources={"CPU": 4})
    urgent = a_place("urgent", submitted=3, priority=1, resources={"CPU": 2})
    found = planned(old, new, urgent, now=10.0)
    assert states(found) == {"old": "admitted", "new": "stopping", "urgent": "waiting"}
    assert (found["new"].preempted_by, found["urgent"].reason) == ("urgent", "waits for a checkpoint of new")
    assert states(planned(*found.values(), now=20.0)) == states(found), "nothing more is preempted meanwhile"
    found["new"] = entered(found["new"], "waiting", 30.0)
    found = planned(*found.values(), now=30.0)
    assert states(found) == {"old": "admitted", "new": "waiting", "urgent": "admitted"}
    assert sentence(found["new"]) == (
        "preempted by urgent; place 1 in the queue: waits for 2 CPUs: old holds 4, urgent holds 2"
    )


def test_nobody_takes_the_quota_of_a_run_that_waits_for_a_checkpoint() -> None:
    found = planned(
        held("low", resources={"CPU": 7}),
        a_place("urgent", owner="bob", priority=1, resources={"CPU": 4}),
        a_place("small", owner="bob", resources={"CPU": 1}),
        limits={"bob": Limits(runs=1)},
    )
    assert states(found) == {"low": "stopping", "urgent": "waiting", "small": "waiting"}


def test_equals_do_not_preempt_and_a_preempted_run_is_protected_for_an_hour() -> None:
    running, same = held("r", resources={"CPU": 8}), a_place("s", resources={"CPU": 8})
    assert planned(running, same)["r"].state == "admitted"
    again = held("r", resources={"CPU": 8}, preempted_by="x")
    urgent = a_place("urgent", priority=1)
    assert planned(again, urgent, now=PROTECTED_SECONDS - 1)["r"].state == "admitted"
    assert planned(again, urgent, now=PROTECTED_SECONDS)["r"].state == "stopping"


def test_a_unit_of_priority_counts_as_an_hour_of_waiting() -> None:
    first = a_place("first", submitted=0.0)
    assert rank(a_place("urgent", priority=1, submitted=AGING_SECONDS - 1)) < rank(first)
    assert rank(a_place("urgent", priority=1, submitted=AGING_SECONDS + 1)) > rank(first)


# ---- preemption, against all subsets -------------------------------------------------------------------------------

amounts = st.fixed_dictionaries({"CPU": st.sampled_from((0.5, 1.0, 2.0, 3.0)), "GPU": st.sampled_from((0.0, 1.0))})


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-2, 2), amounts), min_size=1, max_size=6),
    st.tuples(st.integers(-1, 3), st.fixed_dictionaries({"CPU": st.sampled_from((1.0, 4.0, 8.0))})),
)
def test_preemption_is_minimal(running: Sequence[tuple[int, Amounts]], new: tuple[int, Amounts]) -> None:
    """It happens whenever it can help; no victim could be spared; none has a higher priority than necessary."""
    holders = [held(f"r{i}", priority=p, submitted=i, resources=r) for i, (p, r) in enumerate(running)]
    found = planned(
        *holders, a_place("new", priority=new[0], submitted=100, resources=new[1]), cluster={"CPU": 8.0, "GPU": 8.0}
    )
    free = 8.0 - sum(each.resources["CPU"] for each in holders)
    lower = [each for each in holders if each.priority < new[0]]
    helpful = [
        set(subset)
        for size in range(len(lower) + 1)
        for subset in itertools.combinations([each.run for each in lower], size)
        if free + sum(each.resources["CPU"] for each in lower if each.run in subset) >= new[1]["CPU"]
    ]
    victims = {place.run for place in found.values() if place.state == "stopping"}
    if set() in helpful:
        assert (victims, found["new"].state) == (set(), "admitted")
    elif not helpful:
        assert (victims, found["new"].state) == (set(), "waiting")
    else:
        assert victims in helpful
        assert not any(other < victims for other in helpful)
        priorities = {each.run: each.priority for each in lower}
        assert max(priorities[run] for run in victims) == min(max(priorities[run] for run in each) for each in helpful)


# ---- a cluster in simulated time -----------------------------------------------------------------------------------


class Simulation:
    """Runs that arrive, do some ticks of work and end; a preempted one keeps the work that it has done."""

    def __init__(self, limits: Mapping[str, Limits]) -> None:
        self.now, self.limits = 0.0, limits
        self.places: dict[str, Place] = {}
        self.left: dict[str, int] = {}
        self.first_admitted: dict[str, float] = {}

    def submit(self, ticks: int, **fields: Any) -> str:
        run = f"r{len(self.left):04}"
        self.left[run] = ticks
        self.places[run] = a_place(run, submitted=self.now, since=self.now, **fields)
        return run

    def tick(self) -> None:
        """Let half an hour pass."""
        self.now += TICK
        for run, place in list(self.places.items()):
            if place.state == "stopping":
                self.places[run] = entered(place, "waiting", self.now)
            elif place.state == "admitted":
                self.left[run] -= 1
                if self.left[run] == 0:
                    del self.places[run]
        before, self.places = self.places, planned(*self.places.values(), now=self.now, limits=self.limits)
        self.check_amounts()
        self.check_order(before)
        for run, place in self.places.items():
            if place.state == "admitted":
                self.first_admitted.setdefault(run, self.now)

    def check_amounts(self) -> None:
        holding = [place for place in self.places.values() if place.state != "waiting"]
        for name, whole in CLUSTER.items():
            assert sum(place.resources.get(name, 0.0) for place in holding) <= whole + 1e-6
        for owner, limits in self.limits.items():
            theirs = [place for place in holding if place.owner == owner]
            assert limits.runs is None or len(theirs) <= limits.runs
            assert limits.cpus is None or sum(place.resources["CPU"] for place in theirs) <= limits.cpus + 1e-6

    def check_order(self, before: Mapping[str, Place]) -> None:
        """Between runs of one owner that need the same, the one that ranks first starts first."""
        waiting = [place for place in self.places.values() if place.state == "waiting"]
        started = [
            place
            for place in self.places.values()
            if place.state == "admitted" and before[place.run].state == "waiting"
        ]
        for late, early in itertools.product(started, waiting):
            if (late.owner, late.resources) == (early.owner, early.resources):
                assert rank(late) < rank(early)
        positions = [place.position for place in sorted(waiting, key=rank)]
        assert positions == list(range(1, len(waiting) + 1))
        assert all(place.reason for place in waiting)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # ticks since the arrival before
        st.integers(1, 6),  # ticks of work
        st.integers(-MAX_PRIORITY, MAX_PRIORITY),
        st.sampled_from((*OWNERS, "")),
        st.fixed_dictionaries({"CPU": st.sampled_from((1.0, 2.0, 4.0, 8.0)), "GPU": st.sampled_from((0.0, 1.0))}),
    ),
    min_size=1,
    max_size=25,
)
quotas = st.fixed_dictionaries(
    {
        "alice": st.builds(Limits, runs=st.sampled_from((None, 1, 2)), cpus=st.sampled_from((None, 4.0, 8.0))),
        "bob": st.builds(Limits, runs=st.sampled_from((None, 1)), cpus=st.sampled_from((None, 2.0))),
    }
)


@settings(max_examples=60, deadline=None)
@given(arrivals, quotas)
def test_quotas_and_the_cluster_are_never_exceeded_and_everything_that_fits_ends(
    coming: Sequence[tuple[int, int, int, str, Amounts]], limits: dict[str, Limits]
) -> None:
    simulation = Simulation(limits)
    for pause, ticks, priority, owner, resources in coming:
        for _ in range(pause):
            simulation.tick()
        simulation.submit(ticks, priority=priority, owner=owner, resources=resources)
    for _ in range(4 * sum(ticks for _, ticks, *_ in coming) + 10 * len(coming) + 10):
        simulation.tick()
    too_big = {place.run for place in simulation.places.values()}
    for run in too_big:
        assert simulation.places[run].reason.startswith("needs "), "only what can never run is left"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, MAX_PRIORITY), st.sampled_from((1.0, 2.0, 4.0, 8.0))),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from((2.0, 8.0)),
    st.sampled_from(("", "alice")),
)
@pytest.mark.parametrize("priority", [-MAX_PRIORITY, 0])
def test_no_run_starves_under_endless_load(
    priority: int, stream: Sequence[tuple[int, int, float]], cpus: float, owner: str
) -> None:
    """A run starts once everything has ended that was submitted before the bound; later runs cannot delay it."""
    limits = {"alice": Limits(runs=2)}
    simulation = Simulation(limits)
    waiter = simulation.submit(4, priority=priority, owner=owner, resources={"CPU": cpus})
    bound = (MAX_PRIORITY - priority) * AGING_SECONDS
    work, number = 0, 0
    while waiter not in simulation.first_admitted:
        ticks, urgency, needed = stream[number % len(stream)]
        number += 1
        if simulation.now < bound:
            work += ticks
        simulation.submit(ticks, priority=urgency, owner=owner, resources={"CPU": needed})
        simulation.tick()
        # Every tick, one of these runs works or stops for another; the last may begin when the wait is over.
        assert simulation.now <= bound + PATIENCE_SECONDS + (2 * work + 10) * TICK
