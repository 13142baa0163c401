"""The coordinator: one run, from the first prompt to the last published version.

One group's way:  dataset -> admit -> generate -> score -> buffer -> step -> publish -> broadcast -> slot freed

                 ┌────────── slots freed ───────────┐
                 v                                  │
    prompts ─> admit ─> actors ─> reward workers ─> buffer ─> learner ─> broadcast
                          ^                                                 │
                          └──────────────── new weights ────────────────────┘

Who waits for whom (every wait is bounded):

    loop       consumes        produces      waits when                               woken by
    admit      prompts         open groups   no slot, or a deadline would not hold    broadcast done, group dropped
    make       open group      ready group   actors or reward workers are busy        the pools (their deadlines)
    train      P ready groups  a version     fewer than P ready, or a due group is    a group becoming ready
                                             not
    broadcast  a version       free slots    the broadcast before it is under way,    the actor pool (its deadlines)
                                             or a version is evaluated

The coordinator touches metadata only: token arrays stay in Ray's object store.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from learner.records import StepReport
from services.buffer import SlotBuffer
from services.data.mixture import order_of
from services.dead_batches import DeadBatches
from services.due import evaluates_at, longest_silence, owes_evaluation, request_of, saves_at
from services.pinned import PinnedEvaluation
from services.roles import Generator, Judge, Learner
from services.scoring_health import ScoringHealth
from services.solve_rates import SolveRates
from services.start import first_error
from services.state import Desired
from services.steps import FinishedStep, ReadyGroup, Recorder, ResumePoint, StepTimes
from services.tokens import EncodedPrompt
from services.turns import Turns, make_group
from services.waits import Waits
from volley.errors import DeadlineExceeded
from volley.job import RLJob
from volley.objectives import check_objective, resolve
from volley.records import Prompt, Scores

PROBE_LOOK_SECONDS = 0.5  # between looks whether a group may be tried while scoring fails


class Coordinator:
    """Runs the loops above over one job. Owned by one event loop.

    Args:
        job: the job.
        prompts: the data set, encoded; met in the job's seeded order, pass after pass.
        actors, rewards, learner: the three roles, started, all holding version 0.
        recorder: told of every step and event.
        evaluate: called with a version at the job's evaluation steps; the actors serve it until it returns.
        desired: changes to the job; `want` brings later ones.
        ending: set when the run is to end at a checkpoint as it is desired to when it is stopped.
        resume: where a checkpoint of this job left off; actors and learner hold its version.
        turns: what samples that fail are shown, where the job has turns.
        checkpoint: called between steps, at the job's checkpoint steps, with the number of steps done, what else
            a resumed run must know, and the groups that wait to be trained on.
    """

    def __init__(
        self,
        job: RLJob,
        prompts: Sequence[EncodedPrompt],
        *,
        actors: Generator,
        rewards: Judge,
        learner: Learner,
        recorder: Recorder,
        evaluate: Callable[[int], Awaitable[None]],
        checkpoint: Callable[[int, dict[str, Any], list[ReadyGroup]], Awaitable[None]],
        desired: Desired | None = None,
        resume: ResumePoint | None = None,
        ending: asyncio.Event | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.job, self.prompts = job, prompts
        self.actors, self.rewards, self.learner = actors, rewards, learner
        self.recorder, self.checkpoint = recorder, checkpoint
        self.turns = turns
        self.desired, self._ending = desired or Desired(), ending or asyncio.Event()
        resume = resume or ResumePoint.start()
        self.ledger, self.version = resume.ledger, resume.step
        owes = owes_evaluation(job, resume.step, made=resume.evaluated)
        self.pinned = PinnedEvaluation(evaluate, self._notify, stopping=lambda: self._stopping, owes=owes)
        self.buffer: SlotBuffer[ReadyGroup] = SlotBuffer(job.prompts_per_step, self._max_lag())
        self.waits = Waits()
        self._changed = asyncio.Condition()
        self._health = ScoringHealth(job.infra_errors)
        self._making: dict[int, str] = {}  # groups under way, and in which stage
        self._refills = resume.refills
        self._dead_batches = DeadBatches(job.max_dead_batches, resume.dead_batches)
        self._solve_rates = SolveRates(job, resume.solve_rates)
        self._saved_at = self.version if self.version else None
        for ready in resume.ready:
            self._take_back(ready)
        # Of a resumed run: admitted before, lost with their process.
        self._lost = sorted(self.ledger.in_flight - {ready.meta.group_id for ready in resume.ready})

    async def run(self) -> bool:
        """Every step of the job: True when the actors serve the last version, False when it was stopped before.

        Raises:
            WorkerDied, DeadlineExceeded: a role failed, or kept somebody waiting beyond its bound.
            NoSignal: ``max_dead_batches`` batches in a row gave no gradient, or scoring failed for too long.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                making: set[asyncio.Task[None]] = set()
                admitting = tasks.create_task(self._admit_loop(tasks, making), name="admit")
                ending = [tasks.create_task(each) for each in (self._hear_of_the_end(), self._end_in_order())]
                await self._train_loop(tasks)
                for task in (admitting, *ending, *making):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        if self.version < self.job.steps or self.pinned.owed:
            return False
        await self._close_ledger()
        return True

    async def want(self, desired: Desired) -> None:
        """From now on ``desired`` holds: of the objective and the rate from the next step, of the rest at once."""
        if desired.objective != self.desired.objective:
            changed = resolve(self.job.objective, self.job.schedule, self.version, desired.objective)
            check_objective(changed, self.job.sampling.n)
            await self.recorder.event("objective_changed", step=self.version, objective=changed.model_dump())
        self.desired = desired
        self.buffer.max_lag = self._max_lag()
        await self._notify()

    @property
    def held(self) -> str:
        """Why no group is admitted, or nothing."""
        if self.desired.paused:
            return "paused by its user"
        if self.desired.actors == 0:
            return "no actors are desired"
        return self._health.problem

    @property
    def starving(self) -> bool:
        """Does the learner wait for groups?"""
        return "learner" in self.waits and not self.held and self.pinned.version is None

    def groups(self) -> dict[str, int]:
        """How many groups are in which stage."""
        stages = list(self._making.values())
        return {
            "generating": stages.count("generate"),
            "scoring": stages.count("score"),
            "ready": self.buffer.ready,
            "held": self.buffer.held,
            "slots": self.buffer.slots,
        }

    def _take_back(self, ready: ReadyGroup) -> None:
        """A group that was ready when the checkpoint was written waits again."""
        oldest = ready.meta.oldest_version
        self.buffer.admit(ready.meta.group_id, started_at=oldest, lag=ready.max_lag)
        self.buffer.put(ready.meta.group_id, ready, oldest_version=oldest)

    def _max_lag(self) -> int:
        return self.job.max_lag if self.desired.max_lag is None else self.desired.max_lag

    # ---- admit -------------------------------------------------------------------------------------------------

    async def _admit_loop(self, tasks: asyncio.TaskGroup, making: set[asyncio.Task[None]]) -> None:
        order = order_of(self.job.data, [each.prompt for each in self.prompts], seed=self.job.seed)
        again = self._lost
        while True:
            if not await self._room(again=bool(again)):
                continue
            group_id = again.pop(0) if again else self.ledger.admit()
            self.buffer.admit(group_id, started_at=self.actors.version)
            self._making[group_id] = "generate"
            if self._health.failing:
                self._health.probing()
            task = tasks.create_task(self._make(group_id, self.prompts[order[group_id]]), name=f"group {group_id}")
            making.add(task)
            task.add_done_callback(making.discard)

    async def _room(self, *, again: bool) -> bool:
        """Wait until one more group may start. The other loops wake this one; while scoring fails, so does time."""
        try:
            async with asyncio.timeout(PROBE_LOOK_SECONDS if self._health.failing else None), self._changed:
                await self._changed.wait_for(lambda: self._may_admit(again=again))
        except TimeoutError:
            return False
        return True

    def _may_admit(self, *, again: bool) -> bool:
        planned = self.job.steps * self.job.prompts_per_step
        if self._health.failing and (self._making or not self._health.probe_due()):
            return False
        if self.desired.paused or self.desired.actors == 0:
            return False
        wanted = again or self.ledger.admitted - self._refills < planned
        return wanted and self.buffer.can_admit(started_at=self.actors.version, version=self.version)

    # ---- make one group ----------------------------------------------------------------------------------------

    async def _make(self, group_id: int, encoded: EncodedPrompt) -> None:
        made = await make_group(
            request_of(self.job, group_id, encoded),
            encoded.prompt,
            actors=self.actors,
            rewards=self.rewards,
            turns=self.turns,
            stage=lambda stage: self._making.__setitem__(group_id, stage),
        )
        del self._making[group_id]
        meta, scores = made.meta, made.scores
        await self._note_health(scores)
        if int(scores.valid_n.sum()) >= 2:
            lag = self.buffer.lag_of(group_id)
            ready = ReadyGroup(made.group, meta, encoded.prompt, scores, lag, made.generated, scored=time.time())
            self.buffer.put(group_id, ready, oldest_version=meta.oldest_version)
        else:
            await self._drop_unscored(group_id, encoded.prompt, scores)
        await self._notify()

    async def _note_health(self, scores: Scores) -> None:
        failing = self._health.failing
        self._health.note(scores)
        if self._health.failing and not failing:
            await self.recorder.event("paused", problem=self._health.problem)
        elif failing and not self._health.failing:
            await self.recorder.event("unpaused", problem="")

    async def _drop_unscored(self, group_id: int, prompt: Prompt, scores: Scores) -> None:
        """A group that scoring failed on leaves the run; another is admitted in its place."""
        reason = f"{int(scores.valid_n.sum())} of {len(scores.valid_n)} samples could be scored"
        detail = next((verdict.detail for verdict in scores.verdicts if verdict.reward is None), "")
        self.buffer.drop(group_id)
        self.ledger.drop(group_id, reason)
        self._refills += 1
        await self.recorder.dropped(group_id, prompt.id, self.version, reason, detail)

    # ---- train -------------------------------------------------------------------------------------------------

    async def _train_loop(self, tasks: asyncio.TaskGroup) -> None:
        if self.pinned.owed:
            self.pinned.begin(tasks, self.version)
        sending: asyncio.Task[None] | None = None
        for step in range(self.version, self.job.steps):
            begun = time.time()
            batch = await self._next_batch()
            if batch is None:
                break
            waited = time.time()
            report = await self._learn(step, batch)
            learned = time.time()
            await self.learner.begin_publish(self.version + 1)
            times = StepTimes(begun, waited, learned, gathered=time.time())
            self.version += 1
            if sending is not None:
                with self.waits.on("learner", lambda: f"the actors to take version {self.version - 1}"):
                    await sending
            sending = tasks.create_task(self._send(step, batch, report, times), name=f"broadcast {self.version}")
            self._dead_batches.note(report.metrics["live_group_fraction"])
            if evaluates_at(self.job, self.version):
                await sending
                self.pinned.begin(tasks, self.version)
            if saves_at(self.job, self.version):
                await sending  # a checkpoint never runs ahead of the rows of its steps
                await self._save()
        if sending is not None:
            await sending
        if self._saved_at != self.version:
            await self._save()

    async def _learn(self, step: int, batch: Sequence[ReadyGroup]) -> StepReport:
        objective = resolve(self.job.objective, self.job.schedule, step, self.desired.objective)
        check_objective(objective, self.job.sampling.n)
        report = await self.learner.step(
            self._solve_rates.columns(batch, objective),
            version=self.version,
            objective=objective,
            learning_rate=self.desired.learning_rate,
            max_lag=max(ready.max_lag for ready in batch),
        )
        self._account(batch, report)
        return report

    async def _save(self) -> None:
        with self.waits.on("learner", lambda: f"the evaluation of version {self.pinned.version}"):
            await self.pinned.finished()
        self._saved_at = self.version
        with self.waits.on("learner", lambda: f"the checkpoint of step {self.version}"):
            await self.checkpoint(self.version, self._state(), self.buffer.ready_items())

    async def _next_batch(self) -> tuple[ReadyGroup, ...] | None:
        """The next batch, or None where the run is to stop. While the run is held, waiting has no bound.

        Nor has it while a version is evaluated: that is bounded by itself, and may keep all slots and actors.
        """
        bound = longest_silence(self.job, self.turns.most if self.turns else 1)
        with self.waits.on("learner", self._awaited):
            while not self._stopping:
                if (batch := self.buffer.take(self.version)) is not None:
                    return tuple(ready for _, ready in batch)
                try:
                    async with asyncio.timeout(None if self.held or self.pinned.version is not None else bound):
                        await self._progress()
                except TimeoutError:
                    raise DeadlineExceeded("learner", self._awaited(), bound) from None
        return None

    async def _progress(self) -> None:
        """Wait for a batch, one more ready group, or another state of things; a drop alone is no progress."""
        ready, before = self.buffer.ready, (self.held, self.desired, self.pinned.version, self._stopping)

        def moved() -> bool:
            now = (self.held, self.desired, self.pinned.version, self._stopping)
            changed = self.buffer.ready > ready or now != before
            return changed or self.buffer.can_take(self.version)

        await self._until(moved)

    def _awaited(self) -> str:
        due = self.buffer.waiting_for(self.version)
        if self.held:
            return f"step {self.version}: the run is held, {self.held}"
        groups = f"groups {due[:5]}, due at version {self.version}" if due else "groups in generation or scoring"
        return f"step {self.version}: {self.buffer.ready} of {self.buffer.batch} groups ready, {groups}"

    def _account(self, batch: Sequence[ReadyGroup], report: StepReport) -> None:
        for ready in batch:
            group_id = ready.meta.group_id
            if (reason := report.dropped.get(group_id)) is not None:
                self.ledger.drop(group_id, reason)
            else:
                self.ledger.train(group_id)
        self.ledger.check()

    # ---- broadcast ---------------------------------------------------------------------------------------------

    async def _send(self, step: int, batch: tuple[ReadyGroup, ...], report: StepReport, times: StepTimes) -> None:
        with self.waits.on("broadcast", lambda: f"the learner to store version {step + 1}"):
            update = await self.learner.published(step + 1)
        times = replace(times, published=time.time())
        with self.waits.on("broadcast", lambda: f"the evaluation of version {self.pinned.version}"):
            await self.pinned.finished()
        with self.waits.on("broadcast", lambda: f"the actors to serve version {update.version}"):
            broadcast = await self.actors.broadcast(update)
        self.buffer.release(len(batch))
        await self._notify()
        finished = FinishedStep(step, batch, report, broadcast, times, update.nbytes, self.ledger.counts())
        await self.recorder.step(finished)

    # ---- small parts -------------------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return self.desired.stopped or self._ending.is_set()

    async def _hear_of_the_end(self) -> None:
        await self._ending.wait()
        await self._notify()

    async def _end_in_order(self) -> None:
        """A run that is to stop waits for no evaluation."""
        while True:
            await self._until(lambda: self._stopping)
            await self.pinned.give_up()
            await self._until(lambda: not self._stopping)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        """What a resumed run must know, JSON."""
        return {
            "ledger": self.ledger.state(),
            "refills": self._refills,
            "dead_batches": self._dead_batches.in_a_row,
            "solve_rates": self._solve_rates.state(),
            "evaluated": not self.pinned.owed,
        }

    async def _close_ledger(self) -> None:
        for group_id in sorted(self.ledger.in_flight):
            self.ledger.drop(group_id, "the run ended")
            await self.recorder.dropped(group_id, "", self.version, "the run ended", "")
        self.ledger.check()
