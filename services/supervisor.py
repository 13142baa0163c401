"""Keeps every run alive: starts drivers, starts them again when they die, and ends runs that can not be helped.

    Redis: record, desired, observed ─┐
    Ray: is a driver alive?          ─┼─> decide ─> submit | kill | end | wait
    Redis: lives so far              ─┘

One supervisor acts at a time, by a lease. What it did is written down before it is done, so that another one
takes over where it stopped; while Redis or Ray is away nothing is decided.

| the run is                      | no driver                                                | a driver             |
|---------------------------------|----------------------------------------------------------|----------------------|
| queued                          | submit                                                   | kill if mute         |
| starting, running, paused, ...  | submit again, at growing intervals; end as failed after  | kill if mute         |
|                                 | `BARREN_LIVES` without a step; a driver that waited for  |                      |
|                                 | room to its end, or was told to end, is none of these    |                      |
| any of these, a stop is desired | end as stopped                                           | kill if mute         |
| stopped, no stop is desired     | as if it had died: nobody asked it to stop               | kill if it stays     |
| failed                          | submit if its user desired something since, or if the    | kill if it stays     |
|                                 | driver was killed as it said so: its roles died with it  |                      |
| done                            | nothing                                                  | kill if it stays     |
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.launcher import JobStatus, Launcher, kill_here
from services.state import ENDED, Desired, Observed, RunRecord
from services.store import Store, answer, connect
from volley.base import Spec
from volley.errors import HostError

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
LEASE_SECONDS = 30.0
SETTLED_LOOKS = 5  # a run that needs nothing is looked at in one pass of so many
BARREN_LIVES = 5  # drivers in a row that end without a step before the run is given up
LONGEST_DELAY = 60.0  # between two drivers of one run
MUTE_SECONDS = 60.0  # a live driver that reports nothing for so long hangs
START_SECONDS = 600.0  # the same for one that has never reported
SETTLE_SECONDS = 60.0  # after Redis was away its drivers have so long to report again
LIVES_KEY = "volley:lives"


class Lives(Spec):
    """What the supervisor knows of the drivers a run has had. Times in seconds since 1970."""

    count: int = 0
    submitted: float = 0.0
    revision: int = 0  # of what was desired when the last one was submitted
    step: int = 0  # most steps done when one was submitted
    barren: int = 0  # drivers in a row that were submitted though the one before had done no step
    killed: bool = False  # by the supervisor: the last one was mute

    def after_submit(self, desired: Desired, observed: Observed, now: float) -> "Lives":
        """With one more driver. A run that its user takes up again begins with a clean slate."""
        fresh = self.count == 0 or observed.step > self.step or self.taken_up(desired, observed)
        barren = self.barren if self.blameless(observed) else self.barren + 1
        return Lives(
            count=self.count + 1,
            submitted=now,
            revision=desired.revision,
            step=max(self.step, observed.step),
            barren=0 if fresh else barren,
        )

    def blameless(self, observed: Observed) -> bool:
        """Did the last driver have no chance of a step: it waited for room, or others told it to end?

        What an earlier one reported does not speak for it.
        """
        spoke = observed.updated > self.submitted
        return spoke and not self.killed and observed.state in ("pending", "stopped")

    def taken_up(self, desired: Desired, observed: Observed) -> bool:
        """Has the user of a run that ended desired something since?"""
        return observed.state in ENDED and desired.revision > max(self.revision, observed.revision)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done. ``settled``: nor will there be, until somebody desires something."""

    settled: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a driver."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the driver there is; the next look starts another."""

    why: str


@dataclass(frozen=True, slots=True)
class End:
    """No driver is left to say so: the run has ended."""

    state: Literal["stopped", "failed"]
    problem: str = ""


Action = Wait | Submit | Kill | End


def decide(
    desired: Desired, observed: Observed, job: JobStatus, lives: Lives, now: float, *, watched: float = SETTLE_SECONDS
) -> Action:
    """What to do about one run.

    Args:
        job: of the newest driver; Ray forgets drivers when its head is replaced.
        now: seconds since 1970.
        watched: seconds that Redis has answered without a break.
    """
    if job == "alive":
        return _about_driver(observed, lives, now, watched)
    if observed.state == "done" or (observed.state in ENDED and desired.stopped):
        return Wait(settled=True)
    if desired.stopped:
        return End("stopped")
    if lives.taken_up(desired, observed):
        return Submit()
    if observed.state == "failed" and (job != "killed" or lives.barren >= BARREN_LIVES):
        return Wait(settled=True)
    if job == "none" and observed.state != "queued" and not observed.lost(now) and observed.state not in ENDED:
        return Wait()  # Ray does not know the driver, yet it spoke a moment ago
    barren = observed.step <= lives.step and not lives.blameless(observed)
    if barren and lives.barren >= BARREN_LIVES - 1:
        return End("failed", f"{BARREN_LIVES} drivers in a row ended without a step done")
    return Submit() if now >= lives.submitted + delay(lives) else Wait()


def delay(lives: Lives) -> float:
    """Seconds between the last driver's start and the next one's."""
    return min(LONGEST_DELAY, 2.0 ** (lives.barren + 1)) if lives.barren else 0.0


def _about_driver(observed: Observed, lives: Lives, now: float, watched: float) -> Action:
    if watched < SETTLE_SECONDS:
        return Wait()  # it had no chance to report
    silent = now - max(lives.submitted, observed.updated)
    bound = START_SECONDS if observed.updated < lives.submitted else MUTE_SECONDS
    return Kill(f"its driver has reported nothing for {silent:.0f} s") if silent > bound else Wait()


class Supervisor:
    """The loop around `decide`. Owned by one event loop; use as a block, and `run` it for ever.

    Args:
        redis_url: of the same Redis as ``store``'s.
    """

    def __init__(self, store: Store, launcher: Launcher, redis_url: str) -> None:
        self._store, self._launcher = store, launcher
        self._redis: Any = connect(redis_url, retries=0)
        self._name = secrets.token_hex(8)
        self._acts_until = 0.0
        self._answers_since: float | None = None
        self._settled: set[str] = set()
        self._pass = 0
        self._said = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(HostError):  # the lease runs out by itself
            await self._store.release("supervisor", self._name)
        await self._redis.aclose()

    async def run(self) -> None:
        """Look after all runs, for ever, through absences of Redis and Ray."""
        while True:
            try:
                if await self._its_turn():
                    await self.look()
                self._say("")
            except HostError as error:  # a declared point: whoever is away is waited for
                self._say(str(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def _its_turn(self) -> bool:
        until = time.monotonic() + LEASE_SECONDS  # from before the call: never longer than Redis says
        mine = await self._store.lease("supervisor", self._name, LEASE_SECONDS)
        self._acts_until = until if mine else 0.0
        return mine

    async def look(self) -> None:
        """One pass over all runs. Raises `HostError` if Redis is away; a run that Ray does not answer for waits."""
        self._pass += 1
        try:
            run_ids = await self._store.run_ids()
            if self._pass % SETTLED_LOOKS:
                run_ids = [run_id for run_id in run_ids if run_id not in self._settled]
            looked = await self._store.look(run_ids)
            lives = await self._all_lives()
        except HostError:
            self._answers_since = None
            raise
        if self._answers_since is None:
            self._answers_since = time.monotonic()
        for record, desired, observed in looked:
            if time.monotonic() > self._acts_until:
                return
            await self._look_after(record, desired, observed, lives.get(record.id, Lives()))
        if not self._pass % SETTLED_LOOKS:
            await self._forget(lives.keys() - set(run_ids))

    async def _look_after(self, record: RunRecord, desired: Desired, observed: Observed, lives: Lives) -> None:
        run_id, watched = record.id, time.monotonic() - (self._answers_since or time.monotonic())
        job = await self._launcher.status(run_id)
        action = decide(desired, observed, job, lives, time.time(), watched=watched)
        self._settled.discard(run_id)
        match action:
            case Wait(settled=settled):
                if settled:
                    self._settled.add(run_id)
            case Submit():
                await self._submit(record, lives, lives.after_submit(desired, observed, time.time()))
            case Kill(why=why):
                log.warning("run %s: %s, it is killed", run_id, why)
                await self._put_lives(run_id, lives.model_copy(update={"killed": True}))
                if not kill_here(run_id, observed.driver):
                    await self._launcher.stop(run_id)
            case End(state=state, problem=problem):
                if state == "failed":
                    await self._put_lives(run_id, lives.model_copy(update={"barren": BARREN_LIVES}))
                await self._end(run_id, desired, observed, state, problem)

    async def _submit(self, record: RunRecord, before: Lives, lives: Lives) -> None:
        run_id, checkpoint = record.id, record.job.get("checkpoint", {})
        await self._put_lives(run_id, lives)  # before the act: a life's number is never used twice
        log.info("run %s: starting driver %d", run_id, lives.count)
        try:
            await self._launcher.submit(run_id, lives.count, checkpoint.get("grace_s", 0.0))
        except HostError as error:  # a declared point: Ray's trouble is no fault of the run, and other runs go on
            log.warning("run %s: %s", run_id, error)
            await self._put_lives(run_id, before.model_copy(update={"count": lives.count}))

    async def _end(
        self, run_id: str, desired: Desired, observed: Observed, state: Literal["stopped", "failed"], problem: str
    ) -> None:
        if state == "failed" and (last := _last_line(await self._launcher.logs(run_id, 4096))):
            problem = f"{problem}; the last one said: {last}"
        log.warning("run %s: %s %s", run_id, state, problem)
        now = time.time()
        changes = {"state": state, "problem": problem, "revision": desired.revision, "updated": now, "ended": now}
        await self._store.put_observed(run_id, observed.model_copy(update=changes))

    def _say(self, problem: str) -> None:
        """Log a trouble when it begins, changes or ends, not at every look."""
        if problem != self._said:
            log.warning(problem or "all servers answer again")
        self._said = problem

    # ---- lives, in Redis ---------------------------------------------------------------------------------------

    async def _all_lives(self) -> dict[str, Lives]:
        try:
            found = await answer(self._redis.hgetall(LIVES_KEY))
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error
        lives = {}
        for run_id, text in found.items():
            try:
                lives[run_id] = Lives.model_validate_json(text)
            except ValidationError:  # written by another release
                log.warning("run %s: lives not readable, counted from now", run_id)
        return lives

    async def _put_lives(self, run_id: str, lives: Lives) -> None:
        try:
            await answer(self._redis.hset(LIVES_KEY, run_id, lives.model_dump_json()))
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error

    async def _forget(self, gone: Collection[str]) -> None:
        """Drop what is known of runs that were removed."""
        if not gone:
            return
        try:
            await answer(self._redis.hdel(LIVES_KEY, *gone))
        except (RedisError, OSError) as error:
            raise HostError(f"Redis does not answer: {error}") from error


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
