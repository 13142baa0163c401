"""Keeps runs alive: starts their drivers, restarts drivers that die, and ends runs that cannot make progress.

    Redis: record, desired, observed ─┐                                      ┌─> submit
    Ray: is a driver alive?          ─┼─> decide ─> submit ─> its place in ──┼─> wait in the queue
    Redis: history of its drivers    ─┘       └─> kill | end    the queue    └─> stop at a checkpoint

A lease ensures that one supervisor acts at a time. It records each action before performing it, so that another
supervisor can take over at any point. While Redis or Ray does not answer, nothing is decided. What the supervisor
decides is written only if the observed state is still the one that it decided on.

A driver is submitted only while its run is admitted (`services.supervisor.queue`). A run stays admitted until it has
ended, whatever happens to its drivers, or until it is preempted.

`services.supervisor.decisions` has the rules.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.store.redis import Client, Store, answer, close, connect, run_key
from services.supervisor.claims import Claims
from services.supervisor.decisions import BARREN_LIVES, DriverHistory, End, Kill, Look, Submit, Wait, decide
from services.supervisor.places import place_of, preemptions
from services.supervisor.queue import plan, rank, sentence, total
from services.supervisor.ray_jobs import JobStatus, Launcher, kill_here
from services.supervisor.silence import Silence
from volley.errors import HostError
from volley.state import ENDED, Observed, Place, RunRecord

log = logging.getLogger(__name__)

PASS_SECONDS = 2.0  # between two passes over the runs
LEASE_SECONDS = 30.0
SETTLED_PASSES = 5  # a run that needs nothing is checked only once in this many passes
LIVES_KEY = "volley:lives"
ODD = (ValueError, TypeError, LookupError, AttributeError)  # what data that nobody expected raise
ROLES = ("actors", "reward_workers", "environment_workers")
IDLE: Mapping[str, Any] = {  # of a run without a driver
    **{"state": "queued", "ended": None, "workers": (), "waiting": (), "groups": {}, "learner_ranks": 0},
    **dict.fromkeys((*ROLES, *(f"{role}_wanted" for role in ROLES)), 0),
}

ClusterNodes = Callable[[], Awaitable[Sequence[Mapping[str, float]] | None]]


async def unlimited() -> None:
    """The nodes of a cluster that adds some when they are needed."""


class RunWatch(Protocol):
    """Gets to see every run on every pass over it; see `services.notifications.watch`."""

    async def look(self, record: RunRecord, observed: Observed, *, final: bool) -> None:
        """``final``: nothing more will be done about the run. Raises `HostError` if Redis does not answer."""


class Supervisor:
    """The loop around `decide`. Use as an async context manager and call `run`, which never returns.

    Args:
        redis_url: URL of the Redis that ``store`` uses.
        cluster: returns the resources of each live node; None if the cluster adds nodes when they are needed.
        watch: notes what the runs' webhooks are to hear of.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        redis_url: str,
        cluster: ClusterNodes = unlimited,
        watch: RunWatch | None = None,
    ) -> None:
        self._store, self._launcher, self._watch = store, launcher, watch
        self._cluster, self._claims = cluster, Claims()
        self._told_to_stop: set[tuple[str, int]] = set()  # runs and the number of their driver
        self._redis = connect(redis_url, retries=0)
        self._name = secrets.token_hex(8)
        self._lease_until = 0.0
        self._silence = Silence()
        self._left_alone: set[str] = set()  # runs whose data cannot be used, as this pass found out
        self._odd: set[str] = set()  # the same of the pass before
        self._settled: set[str] = set()
        self._pass = 0
        self._outage = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with contextlib.suppress(HostError):  # the lease expires anyway
                await self._store.release("supervisor", self._name)
        finally:
            await close(self._redis)

    async def run(self) -> None:
        """Supervise all runs forever; outages of Redis and Ray are waited out."""
        while True:
            try:
                if await self._has_lease():
                    await self.check_runs()
                self._log_outage("")
            except HostError as error:  # a declared point: try again until it answers
                self._log_outage(str(error))
            await asyncio.sleep(PASS_SECONDS)

    async def _has_lease(self) -> bool:
        until = time.monotonic() + LEASE_SECONDS  # counted from before the call, so never longer than in Redis
        granted = await self._store.lease("supervisor", self._name, LEASE_SECONDS)
        self._lease_until = until if granted else 0.0
        return granted

    async def check_runs(self) -> None:
        """Make one pass over all runs. Raises `HostError` if Redis or Ray does not answer."""
        self._pass += 1
        self._odd, self._left_alone = self._left_alone | self._odd & self._settled, set()
        run_ids = await self._store.run_ids()
        histories = await self._read_histories()
        looks = await self._look(run_ids, histories)
        places = await self._move(looks)
        order = sorted(places, key=lambda run_id: rank(places[run_id]))
        for look in sorted(looks, key=lambda each: order.index(each.run_id) if each.run_id in places else -1):
            if time.monotonic() > self._lease_until:
                return
            if look.run_id not in self._left_alone:
                with self._contained(look.run_id):
                    await self._act(look, places.get(look.run_id))
        if not self._pass % SETTLED_PASSES:
            await self._delete_histories(histories.keys() - set(run_ids))

    async def _look(self, run_ids: Sequence[str], histories: Mapping[str, DriverHistory]) -> list[Look]:
        """Return what there is to see of all runs, without those that are settled in most passes."""
        skipped = self._settled if self._pass % SETTLED_PASSES else ()
        jobs: dict[str, JobStatus] = {}
        for run_id in run_ids:
            if run_id not in skipped:
                with self._contained(run_id):
                    jobs[run_id] = await self._launcher.status(run_id)
        unreadable: dict[str, ValueError] = {}
        runs = await self._store.read_runs(list(jobs), unreadable)  # after Ray: all that an ended driver has reported
        for run_id, error in unreadable.items():
            with self._contained(run_id):
                raise error
        self._silence.begin_pass(time.monotonic(), set(run_ids))
        looks = []
        for record, desired, observed in runs:
            with self._contained(record.id):
                job, history = jobs[record.id], histories.get(record.id, DriverHistory())
                silent = self._silence.of(record.id, (history.count, observed.updated))
                action = decide(desired, observed, job, history, time.time(), silent=silent)
                looks.append(Look(record, desired, observed, history, job, action))
        return looks

    @contextlib.contextmanager
    def _contained(self, run_id: str, consequence: str = "it is left alone") -> Iterator[None]:
        """Log, once, what a run's data raise in the block, so that all other runs are supervised nevertheless."""
        try:
            yield
        except ODD as error:
            if run_id not in self._odd | self._left_alone:
                log.error("run %s: %s, because its data cannot be used", run_id, consequence, exc_info=error)
            self._left_alone.add(run_id)
            self._settled.discard(run_id)

    async def _move(self, looks: Sequence[Look]) -> dict[str, Place]:
        """Move the runs in the queue, and return the places of those that have not ended.

        A run that is left alone keeps its place.
        """
        unreadable: dict[str, ValueError] = {}  # given another place, or none
        before, now = await self._store.places(unreadable), time.time()
        found = []
        for look in looks:
            with self._contained(look.run_id):
                found.append(place_of(look, before.get(look.run_id), self._claims, now))
        kept = [before[run_id] for run_id in self._left_alone & before.keys()]
        places = [*filter(None, found), *(place for place in kept if place.state != "waiting")]
        if any(place.state == "waiting" for place in places):
            places = await self._planned(places, looks, now)
        changed = [place for place in places if place != before.get(place.run)]
        gone = (before.keys() | unreadable.keys()) - {place.run for place in (*places, *kept)}
        if (changed or gone) and time.monotonic() <= self._lease_until:
            await self._store.move(changed, gone, preemptions(before, changed))
        self._claims.keep({place.run for place in places})
        return {place.run: place for place in places}

    async def _planned(self, places: Sequence[Place], looks: Sequence[Look], now: float) -> list[Place]:
        nodes, limits = await self._cluster(), await self._store.limits()
        if nodes is None:
            return plan(places, None, limits, now)
        waiting = {place.run for place in places if place.state == "waiting"}
        misfits = {
            look.run_id: self._claims.misfit(look.record, look.desired, look.workers, nodes)
            for look in looks
            if look.run_id in waiting
        }
        return plan(places, total(nodes), limits, now, misfits)

    async def _act(self, look: Look, place: Place | None) -> None:
        run_id, history = look.run_id, look.history
        self._settled.discard(run_id)
        if self._watch is not None:
            settled = isinstance(look.action, Wait) and look.action.settled
            with self._contained(run_id, "its webhooks hear nothing"):
                await self._watch.look(look.record, look.observed, final=settled)
        match look.action:
            case Wait(settled=True):
                self._settled.add(run_id)
            case Submit() if place is not None and place.state == "admitted":
                await self._submit(look)
            case Kill(why=why):
                log.warning("run %s: %s; killing it", run_id, why)
                await self._write_history(run_id, history.model_copy(update={"killed": True}))
                if not kill_here(run_id, look.observed.driver):
                    await self._launcher.stop(run_id)
            case End():
                await self._end(look, look.action)
        if place is not None and place.state == "waiting":
            await self._report_place(look, place)
        if place is not None and place.state == "stopping":
            await self._preempt(look, place)

    async def _submit(self, look: Look) -> None:
        run_id, grace_s = look.run_id, float(look.record.job.get("checkpoint", {}).get("grace_s", 0.0))
        state, problem = look.observed.state, look.observed.problem
        outdated = state in ENDED or (state == "queued" and problem)
        observed, before = _queued(look, "") if outdated else (look.observed, look.history)
        after = before.after_submit(look.desired, observed, time.time())
        if not await self._report(look, observed, after):  # first, so that a driver's number is never used twice
            return
        log.info("run %s: starting driver %d", run_id, after.count)
        try:
            await self._launcher.submit(run_id, after.count, grace_s)
        except HostError as error:  # a declared point: an error of Ray does not count against the run
            log.warning("run %s: %s", run_id, error)
            await self._write_history(run_id, before.model_copy(update={"count": after.count}))

    async def _report(self, look: Look, observed: Observed, history: DriverHistory) -> bool:
        """Write both together for a run without a driver, unless its observed state has changed since the look."""

        def write(pipe: Client) -> None:
            pipe.set(run_key(look.run_id, "observed"), observed.model_dump_json())
            pipe.hset(LIVES_KEY, look.run_id, history.model_dump_json())

        return await self._store.change_if(look.run_id, look.observed, write)

    async def _report_place(self, look: Look, place: Place) -> None:
        """Show in the run's observed state that it is queued, and why."""
        problem = sentence(place)
        if (look.observed.state, look.observed.problem) != ("queued", problem):
            await self._report(look, *_queued(look, problem))

    async def _preempt(self, look: Look, place: Place) -> None:
        """Ask the run's driver, once, to end at a checkpoint."""
        if look.job != "alive" or (look.run_id, look.history.count) in self._told_to_stop:
            return
        log.info("run %s: stopping it for %s", look.run_id, place.preempted_by)
        await self._launcher.stop(look.run_id)
        self._told_to_stop.add((look.run_id, look.history.count))

    async def _end(self, look: Look, end: End) -> None:
        problem, history, now = end.problem, look.history, time.time()
        if end.state == "failed":
            history = history.model_copy(update={"barren": BARREN_LIVES})
            if last := _last_line(await self._launcher.logs(look.run_id, 4096)):
                problem = f"{problem}; the last one printed: {last}"
        changes = {"state": end.state, "problem": problem, "revision": look.desired.revision}
        ended = look.observed.model_copy(update={**IDLE, **changes, "updated": now, "ended": now})
        if await self._report(look, ended, history):
            log.warning("run %s: %s %s", look.run_id, end.state, problem)

    def _log_outage(self, problem: str) -> None:
        """Log an outage when it begins, changes or ends, not on every pass."""
        if problem != self._outage:
            log.warning(problem or "all servers answer again")
        self._outage = problem

    # ---- histories, in Redis -----------------------------------------------------------------------------------

    async def _read_histories(self) -> dict[str, DriverHistory]:
        try:
            found = await answer(self._redis.hgetall(LIVES_KEY))
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error
        histories = {}
        for run_id, text in found.items():
            try:
                histories[run_id] = DriverHistory.model_validate_json(text)
            except ValidationError:  # written by another release
                log.warning("run %s: the history of its drivers cannot be read and starts anew", run_id)
        return histories

    async def _write_history(self, run_id: str, history: DriverHistory) -> None:
        try:
            await answer(self._redis.hset(LIVES_KEY, run_id, history.model_dump_json()))
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error

    async def _delete_histories(self, run_ids: Collection[str]) -> None:
        if not run_ids:
            return
        try:
            await answer(self._redis.hdel(LIVES_KEY, *run_ids))
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error


def _queued(look: Look, problem: str) -> tuple[Observed, DriverHistory]:
    """Show the run as queued: one that has ended could be deleted while its driver starts."""
    observed = look.observed.model_copy(update={**IDLE, "problem": problem, "updated": time.time()})
    ended = look.observed.state in ENDED
    return observed, look.history.judged(look.desired, look.observed) if ended else look.history


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
