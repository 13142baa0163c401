"""The coordinator: one run, from the first prompt to the last published version.

One group's way:  prompt -> admit -> generate -> score -> buffer -> step -> publish -> broadcast -> slot freed

                 ┌────────── buffer.release ────────────┐
                 v                                      │
    prompts ─> _admit_loop ─> _make ─> buffer ─> _train_loop ─> _send
                              │    ^                  │           │
                              v    │                  v           v
                 actors, reward workers            learner     actors: new weights

Who waits for whom, in which task:

    task               consumes       produces       waits while                              woken by         at most
    _admit_loop        prompts        open groups    no slot is free, a deadline could be     _notify          (1)
                                                     missed, or the run is paused
    _make, per group   an open group  a ready group  actors or reward workers are busy        their pools      (2)
    _train_loop        P groups       a version      fewer than P groups are ready, or one    _notify          (3)
                                                     that is due is not
                                                     the learner takes a step                 its pool         (2)
                                                     the broadcast before is under way        its _send        (2) (4)
                                                     the actors leave shared devices          their pool       (2) (5)
                                                     a checkpoint is begun or stored          its pool         (2) (4)
                                                     a checkpoint waits for an evaluation     pinned.wait      (5)
    _send, per step    a version      free slots     the learner stores the weights, or the   their pools      (2)
                                                     actors load them
                                                     a version is being evaluated             pinned.wait      (5)
                                                     the recorder writes the step's rows      the recorder     (4)

(1) No bound of its own. If it admits nothing because groups are stuck, `_train_loop` gives up first.
(2) Every call to a process has a deadline, and the pools replace a limited number of actors and reward workers that
    miss it; a learner that does ends the coordinator. A group may also wait behind others for a free worker. There is
    no bound while 0 actors are desired: groups then wait for the first actor.
(3) `longest_wait` seconds without one more ready group, then DeadlineExceeded. There is no bound while the run is
    paused (by its user, by 0 desired actors, or by failing scores, which end the run after ``infra_errors.give_up_s``),
    nor while a version is evaluated, which may keep all slots and actors busy.
(4) No bound while the disk is full: rows and checkpoints wait for space, and the run says that it is paused.
(5) No bound of its own: an evaluation is a finite number of groups under (2), and a run that is stopped cancels it.
Further tasks: `_watch_stop_request` and `_stop_evaluations` wait for a stop, one stores a checkpoint: (2) (4), and one
records what went wrong with a group: (4).

The coordinator touches metadata only: token arrays stay in Ray's object store.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from learner.records import StepReport
from services.coordinator.admission import Admission
from services.coordinator.buffer import SlotBuffer
from services.coordinator.clipped_steps import ClippedSteps
from services.coordinator.dead_batches import DeadBatches
from services.coordinator.episode_figures import EpisodeLog
from services.coordinator.episodes import Episodes, make_samples
from services.coordinator.news import GroupNews
from services.coordinator.pinned_evaluation import PinnedEvaluation
from services.coordinator.records import Batch, FinishedStep, Hooks, ReadyGroup, ResumePoint, StepTimes
from services.coordinator.refill import is_dead
from services.coordinator.roles import Roles
from services.coordinator.saving import Saving
from services.coordinator.schedule import evaluates_at, longest_wait, request_of, saves_at, starts_with_evaluation
from services.coordinator.selection import PromptSelection
from services.coordinator.served import ServedChecks
from services.coordinator.solve_rates import SolveRates
from services.coordinator.turns import Turns
from services.coordinator.watchdog import Waits
from services.data.tokens import EncodedPrompt
from services.tasks import first_error
from volley.errors import DeadlineExceeded
from volley.job import RLJob
from volley.objectives import Objective, check_objective, resolve
from volley.state import Desired

PROBE_POLL_SECONDS = 0.5  # how often admission is reconsidered while scoring fails


class Coordinator:
    """Runs the loops above over one job, all on one event loop.

    Args:
        prompts: the encoded data set; the run takes them in the job's seeded order, pass after pass.
        roles: the started roles, all at the version of ``resume``.
        desired: the changes to the job that apply from the start; `apply` brings later ones.
        resume: the state in which a checkpoint of this job left the run; None starts from the first step.
        stop_requested: once set, the run ends at a checkpoint, as it does when its user stops it.
        turns: how samples are made in several turns, or by programs; None if one call makes each.
    """

    def __init__(
        self,
        job: RLJob,
        prompts: Sequence[EncodedPrompt],
        roles: Roles,
        hooks: Hooks,
        *,
        desired: Desired | None = None,
        resume: ResumePoint | None = None,
        stop_requested: asyncio.Event | None = None,
        turns: Turns | Episodes | None = None,
    ) -> None:
        self.job, self.prompts, self.roles, self.hooks, self.turns = job, prompts, roles, hooks, turns
        self.desired = desired or Desired()
        self._stop_requested = stop_requested or asyncio.Event()
        resume = resume or ResumePoint.start()
        self.ledger, self.version = resume.ledger, resume.step
        self.buffer: SlotBuffer[ReadyGroup] = SlotBuffer(job.prompts_per_step, self._max_lag())
        self._solve_rates = SolveRates(job, resume.solve_rates)
        self.admission = Admission(job, self.ledger, self.buffer, resume, self._is_dead)
        self._selection = PromptSelection(job, prompts, self._solve_rates, resume.selection)
        owed = starts_with_evaluation(job, resume.step, evaluated=resume.evaluated)
        self.pinned = PinnedEvaluation(hooks.evaluate, self._notify, stopping=lambda: self._stopping, owed=owed)
        self.waits = Waits()
        self._changed = asyncio.Condition()
        self._episodes = EpisodeLog(turns.environments if isinstance(turns, Episodes) else None)
        self._dead_batches = DeadBatches(job.max_dead_batches, resume.dead_batches)
        self._clipped_steps = ClippedSteps(job.optimizer.clip_norm)
        self._saving = Saving(self.waits, version=self.version or None)
        self._served = ServedChecks(hooks.check_served, self.waits)

    async def run(self) -> bool:
        """Train every step of the job.

        Returns:
            True when the actors serve the last version, False if the run was stopped before.

        Raises:
            WorkerDied, DeadlineExceeded: a role failed, or kept another one waiting too long.
            NoSignal: ``max_dead_batches`` batches in a row gave no gradient, or scoring failed for too long.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                making: set[asyncio.Task[None]] = set()
                admitting = tasks.create_task(self._admit_loop(tasks, making), name="admit")
                stopping = [tasks.create_task(each) for each in (self._watch_stop_request(), self._stop_evaluations())]
                await self._train_loop(tasks)
                for task in (admitting, *stopping, *making):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        if self.version < self.job.steps or self.pinned.owed:
            return False
        await self._close_ledger()
        return True

    async def apply(self, desired: Desired) -> None:
        """Apply ``desired`` from now on: objective and learning rate at the next step, everything else immediately."""
        self.desired = desired
        self.buffer.max_lag = self._max_lag()
        await self._notify()

    @property
    def pause_reason(self) -> str:
        """Why no group is admitted, or "" if the run is not paused."""
        return self.admission.pause_reason(self.desired)

    @property
    def starving(self) -> bool:
        """Whether the learner waits for groups that more actors would bring sooner."""
        return "learner" in self.waits and not self.pause_reason and self.pinned.version is None

    def groups(self) -> dict[str, int]:
        """How many groups are in which stage; ``held`` are trained and keep their slots until the broadcast."""
        return {
            **self.admission.stages(),
            "ready": self.admission.finished,
            "held": self.buffer.unreleased,
            "slots": self.buffer.slots,
        }

    def _max_lag(self) -> int:
        return self.job.max_lag if self.desired.max_lag is None else self.desired.max_lag

    # ---- admit -------------------------------------------------------------------------------------------------

    async def _admit_loop(self, tasks: asyncio.TaskGroup, making: set[asyncio.Task[None]]) -> None:
        while True:
            await self._wait_to_admit()
            group_id = self.admission.admit(served=self.roles.actors.version)
            encoded = self.prompts[self._selection.row(group_id, self._objective(self.version))]
            task = tasks.create_task(self._make(tasks, group_id, encoded), name=f"group {group_id}")
            making.add(task)
            task.add_done_callback(making.discard)

    async def _wait_to_admit(self) -> None:
        """Wait until one more group may start. While scoring fails, that also depends on time, so it is polled."""
        while True:
            try:
                async with asyncio.timeout(PROBE_POLL_SECONDS if self.admission.scoring_problem else None):
                    return await self._wait_until(self._may_admit)
            except TimeoutError:
                continue

    def _may_admit(self) -> bool:
        return self.admission.may_admit(self.desired, served=self.roles.actors.version, version=self.version)

    # ---- make one group ----------------------------------------------------------------------------------------

    async def _make(self, tasks: asyncio.TaskGroup, group_id: int, encoded: EncodedPrompt) -> None:
        made = await make_samples(
            request_of(self.job, group_id, encoded),
            encoded.prompt,
            actors=self.roles.actors,
            rewards=self.roles.rewards,
            turns=self.turns,
            on_stage=partial(self.admission.enter, group_id),
        )
        scores, dropped = made.scores, ""
        scored, prompt = int(scores.valid_n.sum()), encoded.prompt
        troubles, news = self._episodes.note(made.episodes), self.admission.scored(group_id, scores)
        if scored >= 2:
            lag = self.buffer.lag_of(group_id)
            self.admission.ready(
                ReadyGroup(made.group, made.meta, prompt, scores, lag, made.generated, scored=time.time())
            )
        else:  # nothing can be learned from it
            dropped = f"{scored} of {len(scores.valid_n)} samples could be scored"
            self.admission.drop(group_id, dropped)
        if troubles or news or dropped:
            # In a task of its own: a full disk holds it up without bound, and the learner's wait for the group has one.
            told = GroupNews(group_id, prompt.id, self.version, scores, troubles, news, dropped)
            tasks.create_task(told.record(self.hooks.recorder), name=f"news of group {group_id}")
        await self._notify()

    # ---- train, broadcast --------------------------------------------------------------------------------------

    async def _train_loop(self, tasks: asyncio.TaskGroup) -> None:
        if self.pinned.owed:
            self.pinned.begin(tasks, self.version)
        sending: asyncio.Task[None] | None = None
        for step in range(self.version, self.job.steps):
            begun = time.time()
            batch = await self._next_batch()
            if batch is None:
                break
            if self.roles.devices.shared:
                with self.waits.record("learner", lambda: "the actors to leave the devices"):
                    await self.pinned.wait()
                    await self.roles.devices.to_learner()
            waited = time.time()
            report = await self._learn(step, batch)
            learned = time.time()
            if sending is not None:  # the object store has room for two versions
                with self.waits.record("learner", lambda: f"the actors to take version {self.version}"):
                    await sending
            publishing = time.time()
            await self.roles.learner.begin_publish(self.version + 1)
            times = StepTimes(begun, waited, learned, publishing, gathered=time.time())
            self.version += 1
            sending = tasks.create_task(self._send(step, batch, report, times), name=f"broadcast {self.version}")
            if self.roles.devices.shared:
                await sending
            if not self._served.made and self.pinned.version is None:  # an evaluation would hold the update up
                await sending
                await self._served.check(self.version)
            self._dead_batches.note(report.metrics["live_group_fraction"])
            if warning := self._clipped_steps.note(report.metrics["clipped_share"], report.metrics["grad_norm"]):
                await self.hooks.recorder.event("trouble", problem=warning)
            if evaluates_at(self.job, self.version) or self.pinned.owed:  # owed: a stop was withdrawn in this step
                await sending
                self.pinned.begin(tasks, self.version)
            if saves_at(self.job, self.version):
                await sending  # a checkpoint never runs ahead of the rows of its steps
                if self.pinned.version is None:
                    await self._served.check(self.version)
                await self._save(tasks)
        if sending is not None:
            await sending
            if not self._served.made:
                await self._served.check(self.version)
        if self._saving.version != self.version:
            await self._save(tasks)
        await self.pinned.wait()
        await self._saving.wait()

    async def _learn(self, step: int, batch: Batch) -> StepReport:
        objective = self._objective(step)
        check_objective(objective, self.job.sampling.n)
        report = await self.roles.learner.step(
            self._solve_rates.columns(batch, objective),
            version=self.version,
            objective=objective,
            learning_rate=self.desired.learning_rate,
            max_lag=max(ready.max_lag for ready in batch.groups),
        )
        self.ledger.end_batch([ready.meta.group_id for ready in batch.groups], report.dropped, report.dead)
        refilled = batch.figures(report) if self.job.sampling.refill else {}
        own = {**self._served.take_metrics(), **self.roles.devices.take_metrics(), **refilled}
        return replace(report, metrics={**report.metrics, **own})

    def _objective(self, step: int) -> Objective:
        return resolve(self.job.objective, self.job.schedule, step, self.desired.objective)

    def _is_dead(self, ready: ReadyGroup) -> bool:
        """Whether the group would have no gradient in the next step."""
        return is_dead(ready, self._objective(self.version), self._solve_rates, self.job.update)

    async def _save(self, tasks: asyncio.TaskGroup) -> None:
        with self.waits.record("learner", lambda: f"the evaluation of version {self.pinned.version}"):
            await self.pinned.wait()
        await self._saving.begin(tasks, self.hooks, self.version, self._state(), self.admission.waiting())

    async def _next_batch(self) -> Batch | None:
        """Wait for the next batch; None if the run is to stop. Note (3) above says when this wait has no bound."""
        bound = longest_wait(self.job)
        with self.waits.record("learner", self._awaited):
            while not self._stopping:
                if (batch := self.admission.take(self.version)) is not None:
                    return batch
                try:
                    async with asyncio.timeout(None if self.pause_reason or self.pinned.version is not None else bound):
                        await self._wait_for_progress()
                except TimeoutError:
                    raise DeadlineExceeded("learner", self._awaited(), bound) from None
        return None

    async def _wait_for_progress(self) -> None:
        """Wait until a batch can be taken, one more group is ready, not dropped, or the wait's bound may change."""
        finished, before = self.admission.finished, self._wait_conditions()

        def progressed() -> bool:
            changed = self.admission.finished > finished or self._wait_conditions() != before
            return changed or self.buffer.can_take(self.version)

        await self._wait_until(progressed)

    def _wait_conditions(self) -> tuple[str, Desired, int | None, bool]:
        return (self.pause_reason, self.desired, self.pinned.version, self._stopping)

    def _awaited(self) -> str:
        """Describe what the learner waits for."""
        if reason := self.pause_reason:
            return f"step {self.version}: the run is paused, {reason}"
        due = self.buffer.waiting_for(self.version)
        groups = f"groups {due[:5]}, due at version {self.version}" if due else "groups in generation or scoring"
        return f"step {self.version}: {self.buffer.ready} of {self.buffer.batch} groups ready, {groups}"

    async def _send(self, step: int, batch: Batch, report: StepReport, times: StepTimes) -> None:
        with self.waits.record("broadcast", lambda: f"the learner to store version {step + 1}"):
            update = await self.roles.learner.published(step + 1)
        times = replace(times, published=time.time())
        with self.waits.record("broadcast", lambda: f"the evaluation of version {self.pinned.version}"):
            await self.pinned.wait()
        with self.waits.record("broadcast", lambda: f"the actors to serve version {update.version}"):
            broadcast = await self.roles.devices.deliver(update)
        self.buffer.release(len(batch.groups))
        await self._notify()
        figures = self.ledger.counts(), self._episodes.take()
        await self.hooks.recorder.step(FinishedStep(step, batch, report, broadcast, times, update.nbytes, *figures))

    # ---- stop, wait, account -----------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return self.desired.stopped or self._stop_requested.is_set()

    async def _watch_stop_request(self) -> None:
        await self._stop_requested.wait()
        await self._notify()

    async def _stop_evaluations(self) -> None:
        """Cancel evaluations while the run is to stop: it does not wait for them."""
        while True:
            await self._wait_until(lambda: self._stopping)
            await self.pinned.cancel()
            await self._wait_until(lambda: not self._stopping)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        """Wake every `_wait_until`, to check its condition again."""
        async with self._changed:
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        """What a resumed run must know; JSON."""
        return {
            "ledger": self.ledger.state(),
            **self.admission.state(),
            "dead_batches": self._dead_batches.in_a_row,
            "solve_rates": self._solve_rates.state(),
            "evaluated": not self.pinned.owed,
            "selection": self._selection.state(self.ledger.in_flight),
        }

    async def _close_ledger(self) -> None:
        for group_id in sorted(self.ledger.in_flight):
            self.ledger.drop(group_id, "the run ended")
            await self.hooks.recorder.dropped(group_id, "", self.version, "the run ended", "")
        self.ledger.check()
