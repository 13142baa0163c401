"""Run a job of kind ``rl``: start the three roles side by side, hand them to the coordinator, export the result."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from actors.pool import ActorPool
from learner.group import LearnerGroup
from reward_servers.pool import RewardPool
from reward_servers.scorers import check_scorer
from services.checkpoints import complete_checkpoints, save_checkpoint, steps_of
from services.context import Context, its_turn
from services.coordinator import Coordinator
from services.data.prompts import read_prompts
from services.desired import check_desired
from services.evaluate import evaluate, groups_at_once
from services.fetch import fetched
from services.kept_groups import FILE as GROUPS_FILE
from services.kept_groups import KeptGroup, packed, referred, unpacked
from services.needs import needs_of
from services.recorder import RunRecorder
from services.runtime_env import code_is_here
from services.start import start_all, timed
from services.state import Desired
from services.steering import Steering
from services.steps import ReadyGroup, ResumePoint
from services.tokens import EncodedPrompt, encode_prompts, load_tokenizer, model_length
from services.turns import Turns, room_for, turns_of
from services.weight_groups import WeightGroups
from services.wiring import actor_config, reward_config, rl_learner_config
from volley.errors import DeadlineExceeded, WeightsGone, WorkerDied
from volley.job import RLJob
from volley.restarts import Restarts

WENT_WITH_A_NODE = (ObjectLostError, WeightsGone)  # arrays of groups, or weights: the newest checkpoint has them


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was read and checked before any process started."""

    prompts: list[EncodedPrompt]
    heldout: list[EncodedPrompt]
    length: int
    turns: Turns | None


def prepare(job: RLJob) -> Prepared:
    """Read and check data, scorer and lengths; raises `JobError` for what can not be used."""
    prompts = read_prompts(job.data, job.model.path)
    heldout = read_prompts(job.evaluation.data, job.model.path) if job.evaluation else []
    check_scorer(job.scorer, [*prompts, *heldout], code_is_here=code_is_here(job.runtime_env))
    tokenizer, length = load_tokenizer(job.model.path), model_length(job.model.path)
    encoded = encode_prompts(tokenizer, prompts, **room_for(job.sampling.max_tokens, job.turns), length=length)
    held = []
    if job.evaluation:
        room = room_for(job.evaluation.sampling.max_tokens, job.turns, "evaluation.sampling.max_tokens")
        held = encode_prompts(tokenizer, heldout, **room, length=length)
    return Prepared(encoded, held, length, turns_of(job.turns, tokenizer))


async def run(job: RLJob, prepared: Prepared, context: Context, checkpoint: Path | None = None) -> None:
    """The whole run, or what is left of it after ``checkpoint``. The roles are stopped whatever happens.

    Raises:
        RunStopped: its user stopped it; a checkpoint says where.
        CancelledError: so did a signal.
    """
    folder, display = context.folder, context.display
    desired = await context.desired()
    check_desired(job, desired)
    sized = sized_as_desired(job, desired)
    display.say(
        f"{job.name}: starting {sized.actors.count} actor(s), {sized.reward_workers.count} reward worker(s), "
        f"{job.learner.ranks} learner rank(s)"
    )
    took: dict[str, float] = context.facts.setdefault("start_seconds", {})
    async with contextlib.AsyncExitStack() as stack:
        async with its_turn(context, needs_of(sized)):
            actors, rewards, learner = await start_all(
                stack,
                timed(ActorPool.start(actor_config(sized, prepared.length, folder)), "actors", took),
                timed(RewardPool.start(reward_config(sized, folder)), "reward_workers", took),
                timed(LearnerGroup.start(rl_learner_config(job, folder)), "learner", took),
            )
        with display.bar(f"{job.name} steps", job.steps) as bar:
            met = [encoded.prompt for encoded in prepared.prompts]
            recorder = RunRecorder(folder, context.outbox, display, job.samples_kept, bar, context.sinks, met)
            lives = Lives(job, prepared, context, recorder, stack, actors, rewards, learner, desired)
            with context.ending.held(job.checkpoint.grace_s):
                finished = await lives.run(checkpoint)
        if not finished:
            raise context.left()
        await lives.learner.export(folder.model)
    from services import plots  # here, since importing matplotlib takes a second

    plots.learning_curves(folder)
    display.say(f"  model: {folder.model}")


def sized_as_desired(job: RLJob, desired: Desired) -> RLJob:
    """The job with the counts of actors and reward workers that are desired now."""
    actors = job.actors.count if desired.actors is None else desired.actors
    workers = job.reward_workers.count if desired.reward_workers is None else desired.reward_workers
    return job.model_copy(
        update={
            "actors": job.actors.model_copy(update={"count": actors}),
            "reward_workers": job.reward_workers.model_copy(update={"count": workers}),
        }
    )


class Lives:
    """The coordinator's life, and further ones where the learner died: from the newest checkpoint, same actors.

    Attributes:
        learner: the one in use.
    """

    def __init__(
        self,
        job: RLJob,
        prepared: Prepared,
        context: Context,
        recorder: RunRecorder,
        stack: contextlib.AsyncExitStack,
        actors: ActorPool,
        rewards: RewardPool,
        learner: LearnerGroup,
        desired: Desired,
    ) -> None:
        self.job, self.prepared, self.context, self.recorder = job, prepared, context, recorder
        self.stack, self.actors, self.rewards, self.learner = stack, actors, rewards, learner
        self.restarts = Restarts(job.learner.max_restarts)
        self.steering = Steering(
            job, context.folder, context.store, recorder, actors=actors, rewards=rewards, desired=desired
        )

    async def run(self, checkpoint: Path | None) -> bool:
        """As `Coordinator.run`."""
        begin = partial(self._begin, checkpoint)
        async with self.steering.running():
            while True:
                try:
                    return await self._live(await begin())
                except (WorkerDied, DeadlineExceeded, *WENT_WITH_A_NODE) as end:
                    mended = self.learner.failure is not None or isinstance(end, WENT_WITH_A_NODE)
                    if not mended or not self.restarts.allow():
                        raise
                    begin = partial(self._restart_learner, end)

    async def _begin(self, checkpoint: Path | None) -> ResumePoint:
        resume = await self._take_up(checkpoint) if checkpoint else ResumePoint.start()
        await self.recorder.event("resumed" if checkpoint else "started", step=resume.step)
        return resume

    async def _live(self, resume: ResumePoint) -> bool:
        coordinator = Coordinator(
            self.job,
            self.prepared.prompts,
            actors=self.actors,
            rewards=self.rewards,
            learner=self.learner,
            recorder=self.recorder,
            evaluate=self._evaluate,
            checkpoint=self._checkpoint,
            desired=self.steering.desired,
            resume=resume,
            ending=self.context.ending.wanted,
            turns=self.prepared.turns,
        )
        self.recorder.start_clock(resume.step)
        self.steering.steer(coordinator, self.learner)
        self.context.status.source = self.steering.view
        try:
            async with WeightGroups(self.job, self.actors, self.learner).kept():
                return await coordinator.run()
        finally:
            self.context.status.source = dict
            self.context.status.set(**{**self.steering.view(), "state": "starting"})

    async def _restart_learner(self, end: Exception) -> ResumePoint:
        """Another learner, where the newest checkpoint was written; the actors go back to its weights."""
        begun = time.monotonic()
        self.context.status.set(problem=f"the learner starts again: {end}")
        await self.learner.stop()
        config = rl_learner_config(self.job, self.context.folder)
        (self.learner,) = await start_all(self.stack, LearnerGroup.start(config))
        complete = complete_checkpoints(self.context.folder)
        resume = await self._take_up(complete[-1]) if complete else await self._start_over()
        seconds = time.monotonic() - begun
        await self.recorder.event("learner_restarted", problem=str(end), step=resume.step, seconds=seconds)
        return resume

    async def _take_up(self, checkpoint: Path) -> ResumePoint:
        """Bring learner, actors and the run folder to where ``checkpoint`` was written."""
        self.context.folder.rewind(steps_of(checkpoint))
        state = await self.learner.load(checkpoint)
        step = int(state["step"])
        await self.actors.broadcast(await self.learner.publish(step))
        prompts = {encoded.prompt.id: encoded.prompt for encoded in self.prepared.prompts}
        kept = await asyncio.to_thread(unpacked, checkpoint / GROUPS_FILE, prompts)
        return ResumePoint.of(step, state, [referred(each, ray.put(each.group)) for each in kept])

    async def _start_over(self) -> ResumePoint:
        """There is no checkpoint: the first step again, with the model's own weights."""
        self.context.folder.rewind(0)
        await self.actors.broadcast(await self.learner.publish(0))
        return ResumePoint.start()

    async def _checkpoint(self, step: int, state: Mapping[str, Any], ready: Sequence[ReadyGroup]) -> None:
        kept = [KeptGroup(await fetched(each.group), each) for each in ready]
        files = {GROUPS_FILE: await asyncio.to_thread(packed, kept)}
        spec, begun = self.job.checkpoint, time.monotonic()
        await self.recorder.room.wait_for(
            partial(save_checkpoint, self.learner, self.context.folder, spec, step, state, files)
        )
        self.context.status.set(checkpoint=step, checkpointed=time.time())
        await self.recorder.event("checkpoint", step=step, seconds=time.monotonic() - begun)

    async def _evaluate(self, _version: int) -> None:
        plan = self.job.evaluation
        if plan is None:
            return
        evaluation = await evaluate(
            self.prepared.heldout,
            plan.sampling,
            plan.ks,
            actors=self.actors,
            rewards=self.rewards,
            at_once=groups_at_once(self.job.actors, plan.sampling.n),
            seed=self.job.seed,
            on_group=lambda: None,
            turns=self.prepared.turns,
        )
        await self.recorder.evaluation(evaluation)
