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
    broadcast  a version       free slots    the broadcast before it is under way     the actor pool (its deadlines)

The coordinator touches metadata only: token arrays stay in Ray's object store.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from actors.config import BroadcastReport, GenerateRequest
from learner.records import ScoredGroup, StepReport
from services.buffer import SlotBuffer
from services.dataset import Order
from services.ledger import Ledger
from services.roles import Generator, Judge, Learner
from services.start import first_error
from services.tokens import EncodedPrompt
from volley.errors import DeadlineExceeded, NoSignal
from volley.job import RLJob
from volley.objectives import Objective, SolveRate, adaptive_k, check_objective, resolve, visited
from volley.objectives.spec import ObjectiveWithK
from volley.records import GroupMeta, Prompt, Scores, WeightUpdate


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that is generated and scored: metadata, and a reference to its arrays."""

    group: Any
    meta: GroupMeta
    prompt: Prompt
    scores: Scores

    def scored(self) -> ScoredGroup:
        return ScoredGroup(
            group=self.group,
            meta=self.meta,
            rewards_n=self.scores.rewards_n,
            valid_n=self.scores.valid_n,
            answers_n=self.scores.answers_n,
        )


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """All that is known of one step once the actors serve its weights. Times in seconds."""

    step: int
    batch: tuple[ReadyGroup, ...]
    report: StepReport
    broadcast: BroadcastReport
    waited: float
    learned: float
    published: float
    nbytes: int
    ledger: dict[str, int]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Between two steps: ``step`` are done, where every group was, and what schedules go by."""

    step: int
    ledger: Ledger
    dead_batches: int
    solve_rates: dict[str, SolveRate]

    @classmethod
    def of(cls, step: int, state: Mapping[str, Any]) -> "ResumePoint":
        """From what `Coordinator` gave its checkpoint."""
        rates = {prompt: SolveRate(*rate) for prompt, rate in state["solve_rates"].items()}
        return cls(step, Ledger.of(state["ledger"]), int(state["dead_batches"]), rates)


class Recorder(Protocol):
    """Told of everything that happens; writes files, streams and the progress display."""

    async def step(self, finished: FinishedStep) -> None: ...

    async def event(self, kind: str, **details: Any) -> None: ...

    async def dropped(self, group_id: int, prompt_id: str, step: int, reason: str, detail: str) -> None: ...


class Coordinator:
    """Runs the loops above over one job. Owned by one event loop.

    Args:
        job: the job.
        prompts: the data set, encoded; met in the job's seeded order, pass after pass.
        actors, rewards, learner: the three roles, started, all holding version 0.
        recorder: told of every step and event.
        evaluate: called with a version while the actors serve it, at the job's evaluation steps.
        changes: fields in place of the objective's, asked for at every step.
        resume: where a checkpoint of this job left off; actors and learner hold its version.
        checkpoint: called between steps, at the job's checkpoint steps, with the number of steps done and what else
            a resumed run must know.
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
        checkpoint: Callable[[int, dict[str, Any]], Awaitable[None]],
        changes: Callable[[], dict[str, Any]] = dict,
        resume: ResumePoint | None = None,
    ) -> None:
        self.job, self.prompts = job, prompts
        self.actors, self.rewards, self.learner = actors, rewards, learner
        self.recorder, self.evaluate, self.checkpoint = recorder, evaluate, checkpoint
        self.changes = changes
        self._changes_seen: dict[str, Any] = {}
        self.ledger = resume.ledger if resume else Ledger()
        self.buffer: SlotBuffer[ReadyGroup] = SlotBuffer(job.prompts_per_step, job.max_lag)
        self.version = resume.step if resume else 0
        self._changed = asyncio.Condition()
        self._dead_batches = self._deaths_reported = self._unscored = 0
        self._refills = self.ledger.dropped.total()  # groups dropped before a batch took them: each is replaced
        self._solve_rates: dict[str, SolveRate] = {}
        if resume:
            self._dead_batches, self._solve_rates = resume.dead_batches, dict(resume.solve_rates)

    async def run(self) -> None:
        """Every step of the job; returns when the actors serve the last version.

        Raises:
            WorkerDied, DeadlineExceeded: a role failed, or kept somebody waiting beyond its bound.
            NoSignal: ``max_dead_batches`` batches in a row gave no gradient.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                admitting = tasks.create_task(self._admit_loop(tasks), name="admit")
                await self._train_loop(tasks)
                admitting.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        await self._close_ledger()

    # ---- admit -------------------------------------------------------------------------------------------------

    async def _admit_loop(self, tasks: asyncio.TaskGroup) -> None:
        order = Order(len(self.prompts), seed=self.job.seed, shuffle=self.job.data.shuffle)
        again = sorted(self.ledger.in_flight)  # of a resumed run: admitted before, lost with their process
        while True:
            async with self._changed:
                # Woken by the other loops, which are bounded themselves.
                await self._changed.wait_for(self._has_room if again else self._may_admit)
            group_id = again.pop(0) if again else self.ledger.admit()
            self.buffer.admit(group_id, started_at=self.actors.version)
            tasks.create_task(self._make(group_id, self.prompts[order[group_id]]), name=f"group {group_id}")

    def _may_admit(self) -> bool:
        planned = self.job.steps * self.job.prompts_per_step
        return self.ledger.admitted - self._refills < planned and self._has_room()

    def _has_room(self) -> bool:
        return self.buffer.can_admit(started_at=self.actors.version, version=self.version)

    # ---- make one group ----------------------------------------------------------------------------------------

    async def _make(self, group_id: int, encoded: EncodedPrompt) -> None:
        sampling = self.job.sampling
        group, meta = await self.actors.generate(
            GenerateRequest(
                group_id=group_id,
                prompt_id=encoded.prompt.id,
                prompt_p=encoded.tokens_p,
                n=sampling.n,
                temperature=sampling.temperature,
                top_p=1.0,
                max_tokens=sampling.max_tokens,
                seed=_group_seed(self.job.seed, group_id) if sampling.seeded else None,
            )
        )
        scores = await self.rewards.score(group, encoded.prompt)
        valid = int(scores.valid_n.sum())
        if valid >= 2:
            self._unscored = 0
            ready = ReadyGroup(group, meta, encoded.prompt, scores)
            self.buffer.put(group_id, ready, oldest_version=meta.oldest_version)
        else:
            await self._drop_unscored(group_id, encoded.prompt, scores)
        await self._notify()

    async def _drop_unscored(self, group_id: int, prompt: Prompt, scores: Scores) -> None:
        """A group that scoring failed on leaves the run; another is admitted in its place, up to a bound."""
        reason = f"{int(scores.valid_n.sum())} of {len(scores.valid_n)} samples could be scored"
        detail = next((verdict.detail for verdict in scores.verdicts if verdict.reward is None), "")
        self.buffer.drop(group_id)
        self.ledger.drop(group_id, reason)
        self._unscored += 1
        self._refills += 1
        await self.recorder.dropped(group_id, prompt.id, self.version, reason, detail)
        if self._unscored >= self.job.max_unscored_groups:
            raise NoSignal(
                f"{self._unscored} groups in a row could not be scored, the last because: {detail or 'unknown'}. Mend "
                "the scorer, or see the reward workers' logs"
            )

    # ---- train -------------------------------------------------------------------------------------------------

    async def _train_loop(self, tasks: asyncio.TaskGroup) -> None:
        if self.version == 0 and self._evaluates_at(0):
            await self.evaluate(0)
        sending: asyncio.Task[None] | None = None
        for step in range(self.version, self.job.steps):
            begun = time.monotonic()
            batch = await self._next_batch()
            waited = time.monotonic()
            objective = await self._objective(step)
            report = await self.learner.step(self._scored(batch, objective), version=self.version, objective=objective)
            self._account(batch, report)
            learned = time.monotonic()
            update = await self.learner.publish(self.version + 1)
            published = time.monotonic()
            self.version += 1
            if sending is not None:
                await sending
            sending = tasks.create_task(
                self._send(step, batch, report, update, waited - begun, learned - waited, published - learned),
                name=f"broadcast {self.version}",
            )
            await self._report_deaths()
            await self._check_signal(report)
            if self._evaluates_at(self.version):
                await sending
                await self.evaluate(self.version)
            if self._saves_at(self.version):
                await sending  # a checkpoint never runs ahead of the rows of its steps
                await self.checkpoint(self.version, self._state())
        if sending is not None:
            await sending

    async def _objective(self, step: int) -> Objective:
        """The job's objective at this step, with what its user changed since."""
        changes = self.changes()
        objective = resolve(self.job.objective, self.job.schedule, step, changes)
        check_objective(objective, self.job.sampling.n)
        if changes != self._changes_seen:
            self._changes_seen = changes
            await self.recorder.event("objective_changed", step=step, objective=objective.model_dump())
        return objective

    def _scored(self, batch: Sequence[ReadyGroup], objective: Objective) -> list[ScoredGroup]:
        """The batch for the learner, each group with its prompt's own k where the schedule adapts it."""
        scored = [ready.scored() for ready in batch]
        rule = self.job.schedule.adaptive_k
        if rule is None or not isinstance(objective, ObjectiveWithK):
            return scored
        prompts = [ready.prompt.id for ready in batch]
        ks = adaptive_k(objective, rule, [self._solve_rates.get(each) for each in prompts], self.job.sampling.n)
        for each, group in zip(prompts, scored, strict=True):
            rewards = group.rewards_n[group.valid_n].tolist()
            self._solve_rates[each] = visited(self._solve_rates.get(each), rewards, rule)
        return [replace(group, k=int(k)) for group, k in zip(scored, ks, strict=True)]

    async def _next_batch(self) -> tuple[ReadyGroup, ...]:
        bound = round(self.job.actors.group_deadline_s + self.job.reward_workers.group_deadline_s, 3)
        while (batch := self.buffer.take(self.version)) is None:
            try:
                async with asyncio.timeout(bound):
                    await self._progress()
            except TimeoutError:
                raise DeadlineExceeded("learner", self._awaited(), bound) from None
        return tuple(ready for _, ready in batch)

    async def _progress(self) -> None:
        """Wait until one more group is ready; groups dropped and replaced are no progress."""
        ready = self.buffer.ready
        async with self._changed:
            await self._changed.wait_for(lambda: self.buffer.ready > ready)

    def _awaited(self) -> str:
        due = self.buffer.waiting_for(self.version)
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

    async def _report_deaths(self) -> None:
        for death in self.actors.deaths[self._deaths_reported :]:
            self._deaths_reported += 1
            await self.recorder.event("actor_died", problem=str(death))

    async def _check_signal(self, report: StepReport) -> None:
        live = report.metrics["live_group_fraction"]
        self._dead_batches = 0 if live > 0 else self._dead_batches + 1
        if self._dead_batches >= self.job.max_dead_batches:
            raise NoSignal(
                f"{self._dead_batches} batches in a row in which every group's samples earned the same reward: nothing "
                "can be learned from them. Take easier or harder prompts, raise sampling.n, warm the model up first, "
                "or check the scorer on samples.jsonl"
            )

    # ---- broadcast ---------------------------------------------------------------------------------------------

    async def _send(
        self,
        step: int,
        batch: tuple[ReadyGroup, ...],
        report: StepReport,
        update: WeightUpdate,
        waited: float,
        learned: float,
        published: float,
    ) -> None:
        broadcast = await self.actors.broadcast(update)
        self.buffer.release(len(batch))
        await self._notify()
        await self.recorder.step(
            FinishedStep(
                step, batch, report, broadcast, waited, learned, published, update.nbytes, self.ledger.counts()
            )
        )

    # ---- small parts -------------------------------------------------------------------------------------------

    def _evaluates_at(self, version: int) -> bool:
        plan = self.job.evaluation
        if plan is None:
            return False
        if version == 0:
            return plan.at_start
        return version == self.job.steps or (plan.every is not None and version % plan.every == 0)

    def _saves_at(self, version: int) -> bool:
        every = self.job.checkpoint.every
        return version == self.job.steps or (every is not None and version % every == 0)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        """What a resumed run must know, JSON."""
        rates = {prompt: [rate.solved, rate.seen] for prompt, rate in self._solve_rates.items()}
        return {"ledger": self.ledger.state(), "dead_batches": self._dead_batches, "solve_rates": rates}

    async def _close_ledger(self) -> None:
        for group_id in sorted(self.ledger.in_flight):
            self.ledger.drop(group_id, "the run ended")
            await self.recorder.dropped(group_id, "", self.version, "the run ended", "")
        self.ledger.check()


def _group_seed(seed: int, group_id: int) -> int:
    return int(np.random.SeedSequence([seed, group_id]).generate_state(1)[0])
