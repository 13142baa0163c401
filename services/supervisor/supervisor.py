"""Keeps runs alive: starts their drivers, restarts drivers that die, and ends runs that cannot make progress.

    Redis: record, desired, observed ─┐
    Ray: is a driver alive?          ─┼─> decide ─> submit | kill | end | wait
    Redis: history of its drivers    ─┘

A lease ensures that one supervisor acts at a time. It records each action before performing it, so that another
supervisor can take over at any point. While Redis or Ray does not answer, nothing is decided.

| state of the run                | if no driver is alive                                    | if one is alive      |
|---------------------------------|----------------------------------------------------------|----------------------|
| queued                          | submit                                                   | kill if mute         |
| starting, running, paused, ...  | submit again, at growing intervals; end as failed after  | kill if mute         |
|                                 | `BARREN_LIVES` drivers in a row without a step, not      |                      |
|                                 | counting drivers that only waited for resources or       |                      |
|                                 | ended because of a signal                                |                      |
| any of these, a stop is desired | end as stopped                                           | kill if mute         |
| stopped, no stop is desired     | as if the driver had died: no user asked it to stop      | kill if it lingers   |
| failed                          | submit if a user changed the run since; also if the      | kill if it lingers   |
|                                 | driver was killed right after it reported the failure,   |                      |
|                                 | because whatever killed it also kills its workers        |                      |
| done                            | nothing                                                  | kill if it lingers   |
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.store.redis import Store, answer, connect
from services.supervisor.ray_jobs import JobStatus, Launcher, kill_here
from volley.base import Spec
from volley.errors import HostError
from volley.state import ENDED, Desired, Observed, RunRecord

log = logging.getLogger(__name__)

PASS_SECONDS = 2.0  # between two passes over the runs
LEASE_SECONDS = 30.0
SETTLED_PASSES = 5  # a run that needs nothing is checked only once in this many passes
BARREN_LIVES = 5  # drivers in a row that end without a step before the run fails
LONGEST_DELAY = 60.0  # between two drivers of one run
MUTE_SECONDS = 60.0  # a live driver that reports nothing for this long hangs
START_SECONDS = 600.0  # the same for a driver that has never reported
SETTLE_SECONDS = 60.0  # time for drivers to report again after Redis was away
LIVES_KEY = "volley:lives"


class DriverHistory(Spec):
    """The supervisor's record of a run's drivers. Times are in seconds since 1970.

    Attributes:
        count: drivers submitted so far.
        submitted: when the last one was submitted.
        revision: revision of the desired state at that time.
        step: most steps that were done whenever a driver was submitted.
        barren: drivers in a row that were submitted although the one before had done no step.
        killed: the supervisor killed the last one because it was mute.
    """

    count: int = 0
    submitted: float = 0.0
    revision: int = 0
    step: int = 0
    barren: int = 0
    killed: bool = False

    def after_submit(self, desired: Desired, observed: Observed, now: float) -> "DriverHistory":
        """Return the history with one more driver. If a user resumed the run, the count of failures starts anew."""
        fresh = self.count == 0 or observed.step > self.step or self.resumed_by_user(desired, observed)
        barren = self.barren if self.blameless(observed) else self.barren + 1
        return DriverHistory(
            count=self.count + 1,
            submitted=now,
            revision=desired.revision,
            step=max(self.step, observed.step),
            barren=0 if fresh else barren,
        )

    def blameless(self, observed: Observed) -> bool:
        """Return whether the last driver could not do a step because it waited for resources or was asked to end."""
        reported = observed.updated > self.submitted  # the observed state is not that of an earlier driver
        return reported and not self.killed and observed.state in ("pending", "stopped")

    def resumed_by_user(self, desired: Desired, observed: Observed) -> bool:
        """Return whether the run has ended and its desired state was changed since."""
        return observed.state in ENDED and desired.revision > max(self.revision, observed.revision)


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing. ``settled`` means that nothing will be needed until somebody changes the desired state."""

    settled: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a driver."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the driver; a later pass starts another."""

    why: str


@dataclass(frozen=True, slots=True)
class End:
    """Record that the run has ended, because no driver is left to do so."""

    state: Literal["stopped", "failed"]
    problem: str = ""


Action = Wait | Submit | Kill | End


def decide(
    desired: Desired,
    observed: Observed,
    job: JobStatus,
    history: DriverHistory,
    now: float,
    *,
    watched: float = SETTLE_SECONDS,
) -> Action:
    """Decide what to do about one run.

    Args:
        job: status of the newest driver; Ray forgets drivers when its head is replaced.
        now: seconds since 1970.
        watched: seconds for which Redis has answered without interruption.
    """
    if job == "alive":
        return _about_driver(observed, history, now, watched)
    if observed.state == "done" or (observed.state in ENDED and desired.stopped):
        return Wait(settled=True)
    if desired.stopped:
        return End("stopped")
    if history.resumed_by_user(desired, observed):
        return Submit()
    if observed.state == "failed" and (job != "killed" or history.barren >= BARREN_LIVES):
        return Wait(settled=True)
    if job == "none" and observed.state != "queued" and not observed.lost(now) and observed.state not in ENDED:
        return Wait()  # Ray does not know the driver, but it reported a moment ago
    barren = observed.step <= history.step and not history.blameless(observed)
    if barren and history.barren >= BARREN_LIVES - 1:
        return End("failed", f"{BARREN_LIVES} drivers in a row ended without completing a step")
    return Submit() if now >= history.submitted + delay(history) else Wait()


def delay(history: DriverHistory) -> float:
    """Return the seconds between the start of the last driver and the next."""
    return min(LONGEST_DELAY, 2.0 ** (history.barren + 1)) if history.barren else 0.0


def _about_driver(observed: Observed, history: DriverHistory, now: float, watched: float) -> Action:
    if watched < SETTLE_SECONDS:
        return Wait()  # it had no chance to report
    silent = now - max(history.submitted, observed.updated)
    bound = START_SECONDS if observed.updated < history.submitted else MUTE_SECONDS
    return Kill(f"its driver has reported nothing for {silent:.0f} s") if silent > bound else Wait()


class Supervisor:
    """The loop around `decide`. Use as an async context manager and call `run`, which never returns.

    Args:
        redis_url: URL of the Redis that ``store`` uses.
    """

    def __init__(self, store: Store, launcher: Launcher, redis_url: str) -> None:
        self._store, self._launcher = store, launcher
        self._redis = connect(redis_url, retries=0)
        self._name = secrets.token_hex(8)
        self._lease_until = 0.0
        self._answers_since: float | None = None
        self._settled: set[str] = set()
        self._pass = 0
        self._outage = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(HostError):  # the lease expires anyway
            await self._store.release("supervisor", self._name)
        await self._redis.aclose()

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
        try:
            run_ids = await self._store.run_ids()
            if self._pass % SETTLED_PASSES:
                run_ids = [run_id for run_id in run_ids if run_id not in self._settled]
            runs = await self._store.read_runs(run_ids)
            histories = await self._read_histories()
        except HostError:
            self._answers_since = None
            raise
        if self._answers_since is None:
            self._answers_since = time.monotonic()
        for record, desired, observed in runs:
            if time.monotonic() > self._lease_until:
                return
            await self._check_run(record, desired, observed, histories.get(record.id, DriverHistory()))
        if not self._pass % SETTLED_PASSES:
            await self._delete_histories(histories.keys() - set(run_ids))

    async def _check_run(self, record: RunRecord, desired: Desired, observed: Observed, history: DriverHistory) -> None:
        run_id, watched = record.id, time.monotonic() - (self._answers_since or time.monotonic())
        job = await self._launcher.status(run_id)
        action = decide(desired, observed, job, history, time.time(), watched=watched)
        self._settled.discard(run_id)
        match action:
            case Wait(settled=settled):
                if settled:
                    self._settled.add(run_id)
            case Submit():
                await self._submit(record, history, history.after_submit(desired, observed, time.time()))
            case Kill(why=why):
                log.warning("run %s: %s; killing it", run_id, why)
                await self._write_history(run_id, history.model_copy(update={"killed": True}))
                if not kill_here(run_id, observed.driver):
                    await self._launcher.stop(run_id)
            case End(state=state, problem=problem):
                if state == "failed":
                    await self._write_history(run_id, history.model_copy(update={"barren": BARREN_LIVES}))
                await self._end(run_id, desired, observed, state, problem)

    async def _submit(self, record: RunRecord, before: DriverHistory, after: DriverHistory) -> None:
        run_id, checkpoint = record.id, record.job.get("checkpoint", {})
        await self._write_history(run_id, after)  # first, so that a driver's number is never used twice
        log.info("run %s: starting driver %d", run_id, after.count)
        try:
            await self._launcher.submit(run_id, after.count, checkpoint.get("grace_s", 0.0))
        except HostError as error:  # a declared point: an error of Ray does not count against the run
            log.warning("run %s: %s", run_id, error)
            await self._write_history(run_id, before.model_copy(update={"count": after.count}))

    async def _end(
        self, run_id: str, desired: Desired, observed: Observed, state: Literal["stopped", "failed"], problem: str
    ) -> None:
        if state == "failed" and (last := _last_line(await self._launcher.logs(run_id, 4096))):
            problem = f"{problem}; the last one printed: {last}"
        log.warning("run %s: %s %s", run_id, state, problem)
        now = time.time()
        changes = {"state": state, "problem": problem, "revision": desired.revision, "updated": now, "ended": now}
        await self._store.put_observed(run_id, observed.model_copy(update=changes))

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


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
