"""Run a job of kind ``rl``: start the three roles together, hand them to the coordinator, export the result."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ObjectLostError

from actors.config import ActorConfig
from actors.pool import ActorPool
from environments.pool import EnvironmentPool
from learner.config import LearnerConfig
from learner.pool import LearnerPool
from reward_servers.pool import RewardPool
from reward_servers.scorers import check_scorer
from services.control.heartbeat import ObservedUpdate
from services.control.steering import Steering
from services.coordinator.devices import Devices
from services.coordinator.episodes import Episodes
from services.coordinator.loop import Coordinator
from services.coordinator.records import Hooks, ReadyGroup, ResumePoint
from services.coordinator.roles import Roles
from services.coordinator.turns import Turns, turns_of
from services.data.prompts import read_prompts
from services.data.tokens import EncodedPrompt, encode_prompts, load_tokenizer, model_length
from services.evaluation.estimates import summarise
from services.evaluation.evaluate import Sampler, max_groups_in_flight, unscored_problem
from services.evaluation.fetch import fetched
from services.jobs.needs import needs_of, with_desired_counts
from services.jobs.runtime_env import code_is_here
from services.recording.recorder import RunRecorder
from services.runs.checkpointed_groups import FILE as GROUPS_FILE
from services.runs.checkpointed_groups import CheckpointedGroup, pack, unpack
from services.runs.checkpoints import CheckpointWriter, newest_checkpoint_or_none, steps_of
from services.runs.context import Context, start_turn
from services.runs.episodes import (
    NoEnvironments,
    NoRewardWorkers,
    check_program,
    episodes_of,
    length_of,
    roles_started,
    room_of,
    start_environments,
    start_rewards,
)
from services.runs.role_configs import actor_config, rl_learner_config
from services.runs.served_check import check_served
from services.runs.weight_groups import WeightGroups
from services.store.desired import check_desired
from services.tasks import start_all, timed
from volley.errors import DeadlineExceeded, HostError, VolleyError, WeightsGone, WorkerDied
from volley.job import RLJob
from volley.restarts import Restarts
from volley.state import Desired

log = logging.getLogger(__name__)
LOST_WITH_A_NODE = (ObjectLostError, WeightsGone)  # arrays of groups, or weights: the newest checkpoint has them


@dataclass(frozen=True, slots=True)
class RLRun:
    """An rl job that is ready to run.

    Attributes:
        prompts: to train on.
        heldout: to evaluate on; empty if the job has no evaluation.
        length: tokens of the job's longest prompt with the longest sample after it; with a program, of its calls.
        turns: None if the job has one turn.
    """

    job: RLJob
    prompts: list[EncodedPrompt]
    heldout: list[EncodedPrompt]
    length: int
    turns: Turns | None

    @classmethod
    def prepare(cls, job: RLJob) -> Self:
        """Read and check data, scorer and lengths; raises `JobError` for what cannot be used."""
        prompts = read_prompts(job.data, job.model.folder)
        heldout = read_prompts(job.evaluation.data, job.model.folder) if job.evaluation else []
        if job.scorer is not None:
            check_scorer(job.scorer, [*prompts, *heldout], code_is_here=code_is_here(job.runtime_env))
        check_program(job)
        tokenizer, length = load_tokenizer(job.model.folder), model_length(job.model.folder)
        room = room_of(job, job.sampling.max_tokens)
        encoded = encode_prompts(tokenizer, prompts, **room, length=length)
        needed, encoded_heldout = length_of(job, encoded, room["room"], length), []
        if job.evaluation:
            room = room_of(job, job.evaluation.sampling.max_tokens, "evaluation.sampling.max_tokens")
            encoded_heldout = encode_prompts(tokenizer, heldout, **room, length=length)
            needed = max(needed, length_of(job, encoded_heldout, room["room"], length))
        return cls(job, encoded, encoded_heldout, needed, turns_of(job.turns, tokenizer))

    async def run(self, context: Context) -> None:
        """Train every step, or those after the context's checkpoint, then export. The roles are stopped in any case.

        Raises:
            RunStopped: the user stopped the run; there is a checkpoint.
            CancelledError: a signal stopped it; there is a checkpoint if there was time for one.
        """
        job, folder, display = self.job, context.folder, context.display
        desired = await context.desired()
        check_desired(job, desired)
        async with contextlib.AsyncExitStack() as stack:
            pools = await self._start(with_desired_counts(job, desired), context, stack)
            with display.bar(f"{job.name} steps", job.steps) as bar:
                prompts = [encoded.prompt for encoded in self.prompts]
                recorder = RunRecorder(
                    *(folder, context.outbox, display, job.samples_kept, bar, context.sinks, prompts),
                    k=getattr(job.objective, "k", None),
                )
                session = RLSession(self, context, recorder, stack, pools, desired)
                with context.stop_signal.grace_period(job.checkpoint.grace_s):
                    finished = await session.run()
            if not finished:
                raise context.stop_exception()
            await pools.devices.to_learner()
            await context.recorder.disk.retry_while_full(partial(pools.learner.export, folder.model))
        from services.recording import plots  # imported here because matplotlib takes a second

        draw = partial(plots.learning_curves, folder, getattr(job.objective, "k", None))
        await context.recorder.disk.write(draw)
        display.say(f"  model: {folder.model}")

    async def _start(self, sized: RLJob, context: Context, stack: contextlib.AsyncExitStack) -> "Pools":
        """Start the roles of ``sized``, the job with the counts that are desired now. ``stack`` stops them."""
        folder = context.folder
        context.display.say(f"{sized.name}: starting {roles_started(sized)}, {sized.learner.ranks} learner rank(s)")
        shared = sized.placement == "colocated"
        seconds: dict[str, float] = {}
        context.summary_fields["start_seconds"] = seconds
        async with start_turn(context, needs_of(sized)):
            asleep = asyncio.Event()  # the learner, where actors may take its devices only then
            if not shared:
                asleep.set()
            actors, rewards, learner, environments = await start_all(
                stack,
                timed(_start_actors(actor_config(sized, self.length, folder), asleep), "actors", seconds),
                timed(start_rewards(sized, folder), "reward_workers", seconds),
                timed(_start_learner(rl_learner_config(sized, folder), asleep), "learner", seconds),
                start_environments(sized, folder),
            )
        episodes = episodes_of(sized, actors, environments, self.length)
        actors.late_weights.store = learner.store
        return Pools(actors, rewards, learner, environments, episodes, Devices(actors, learner, shared=shared))


async def _start_actors(config: ActorConfig, learner_asleep: asyncio.Event) -> ActorPool:
    await learner_asleep.wait()
    return await ActorPool.start(config)


async def _start_learner(config: LearnerConfig, asleep: asyncio.Event) -> LearnerPool:
    learner = await LearnerPool.start(config)
    if not asleep.is_set():
        try:
            await learner.sleep()
        except BaseException:
            await learner.stop()
            raise
        asleep.set()
    return learner


@dataclass(slots=True)
class Pools:
    """The started roles of a run, and who has the devices.

    The learner is replaced when it dies. ``episodes`` is None without a program.
    """

    actors: ActorPool
    rewards: RewardPool | NoRewardWorkers
    learner: LearnerPool
    environments: EnvironmentPool | NoEnvironments
    episodes: Episodes | None
    devices: Devices


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """When a checkpoint was begun, by the monotonic clock, and for how many seconds the learner waited for it."""

    step: int
    at: float
    waited: float


class RLSession:
    """Runs the coordinator, and runs it again from the newest checkpoint, with the same actors, if the learner dies.

    Args:
        stack: stops every learner that the session starts.
        pools: the started roles; ``pools.learner`` is the learner in use.
        desired: the run's desired state now.
    """

    def __init__(
        self,
        run: RLRun,
        context: Context,
        recorder: RunRecorder,
        stack: contextlib.AsyncExitStack,
        pools: Pools,
        desired: Desired,
    ) -> None:
        self._run, self._context, self._recorder = run, context, recorder
        self._stack, self._pools = stack, pools
        self._restarts = Restarts(run.job.learner.max_restarts)
        self._checkpoints = CheckpointWriter(context.folder, run.job.checkpoint)
        self._checkpoint_begun: CheckpointBegun | None = None  # and not yet stored
        self._steering = Steering(
            run.job,
            context.folder,
            context.store,
            recorder,
            actors=pools.actors,
            rewards=pools.rewards,
            environments=pools.environments,
            desired=desired,
        )

    async def run(self) -> bool:
        """Run the coordinator as `Coordinator.run` does, again after each failure that a new learner can repair.

        Raises:
            Whatever `Coordinator.run` raises, if a new learner cannot repair it or the learner was replaced too often.
        """
        begin: Callable[[], Awaitable[ResumePoint]] = self._begin
        async with self._steering.running():
            while True:
                try:
                    return await self._coordinate(await begin())
                except (WorkerDied, DeadlineExceeded, *LOST_WITH_A_NODE) as error:
                    repairable = self._pools.learner.failure is not None or isinstance(error, LOST_WITH_A_NODE)
                    if not repairable or not self._restarts.allow():
                        raise
                    begin = partial(self._restart_learner, error)

    async def _begin(self) -> ResumePoint:
        checkpoint = self._context.checkpoint
        resume = await self._load(checkpoint) if checkpoint else ResumePoint.start()
        await self._recorder.event("resumed" if checkpoint else "started", step=resume.step)
        return resume

    async def _coordinate(self, resume: ResumePoint) -> bool:
        pools, status = self._pools, self._context.status
        self._checkpoint_begun = None
        coordinator = Coordinator(
            self._run.job,
            self._run.prompts,
            Roles(pools.actors, pools.rewards, pools.learner, pools.devices),
            Hooks(self._recorder, self._evaluate, self._begin_checkpoint, self._checkpoint_stored, self._check_served),
            desired=self._steering.desired,
            resume=resume,
            stop_requested=self._context.stop_signal.requested,
            turns=pools.episodes or self._run.turns,
        )
        self._recorder.start_clock(resume.step)
        self._steering.steer(coordinator, pools.learner)
        status.source = self._steering.view
        try:
            async with WeightGroups(self._run.job, pools.actors, pools.learner).maintained():
                return await coordinator.run()
        except Exception:
            await self._keep_checkpoint()
            raise
        finally:
            status.source = ObservedUpdate
            last: ObservedUpdate = {**self._steering.view(), "state": "starting"}
            status.set(**last)

    async def _restart_learner(self, error: Exception) -> ResumePoint:
        """Start another learner from the newest checkpoint, and give the actors its weights."""
        begun = time.monotonic()
        folder = self._context.folder
        self._context.status.set(problem=f"the learner is being restarted: {error}")
        self._pools.actors.late_weights.store = None
        await self._pools.learner.stop()
        await self._pools.devices.learner_ended()
        config = rl_learner_config(self._run.job, folder)
        (learner,) = await start_all(self._stack, LearnerPool.start(config))
        self._pools.learner = self._pools.devices.learner = learner
        self._pools.actors.late_weights.store = learner.store
        checkpoint = newest_checkpoint_or_none(folder)
        resume = await self._load(checkpoint) if checkpoint else await self._start_over()
        seconds = time.monotonic() - begun
        await self._recorder.event("learner_restarted", problem=str(error), step=resume.step, seconds=seconds)
        return resume

    async def _load(self, checkpoint: Path) -> ResumePoint:
        """Bring the learner, the actors and the run folder to where they were when ``checkpoint`` was written."""
        await self._rewind(steps_of(checkpoint))
        await self._pools.devices.to_learner()
        state = await self._pools.learner.load(checkpoint)
        step = int(state["step"])
        await self._publish(step)
        prompts = {encoded.prompt.id: encoded.prompt for encoded in self._run.prompts}
        groups = await asyncio.to_thread(unpack, checkpoint / GROUPS_FILE, prompts)
        ready = [each.ready(ray.put(each.group)) for each in groups]
        evaluated = any(row["version"] == step for row in self._context.folder.read("evaluations"))
        return ResumePoint.of(step, state, ready, evaluated=evaluated)

    async def _start_over(self) -> ResumePoint:
        """Without a checkpoint: start from the first step again, with the model's own weights."""
        await self._rewind(0)
        await self._publish(0)
        return ResumePoint.start()

    async def _rewind(self, step: int) -> None:
        await self._context.recorder.disk.write(partial(self._context.folder.rewind, step))

    async def _publish(self, step: int) -> None:
        """Give the actors the learner's weights, as those of ``step``."""
        update = await self._pools.learner.publish(step)
        await self._pools.devices.deliver(update)

    async def _check_served(self) -> float | None:
        first = self._run.prompts[0]
        if self._run.job.rollout is not None:  # programs make their own prompts, so this one may be too long
            first = replace(first, tokens_p=first.tokens_p[: max(1, self._run.length // 2)])
        return await check_served(self._pools.actors, self._pools.devices, self._run.job, first)

    async def _begin_checkpoint(self, step: int, state: Mapping[str, Any], ready: Sequence[ReadyGroup]) -> None:
        begun = time.monotonic()
        groups = [CheckpointedGroup.of(each, await fetched(each.group)) for each in ready]
        files = {GROUPS_FILE: await asyncio.to_thread(pack, groups)}
        begin = partial(self._checkpoints.begin, self._pools.learner, step, state, files)
        async with self._pools.devices.borrowed():
            await self._recorder.disk.retry_while_full(begin)
        self._checkpoint_begun = CheckpointBegun(step, begun, waited=time.monotonic() - begun)

    async def _checkpoint_stored(self) -> None:
        await self._recorder.disk.retry_while_full(partial(self._checkpoints.stored, self._pools.learner))
        await self._note_checkpoint()

    async def _keep_checkpoint(self) -> None:
        """Store a checkpoint that was begun before the run failed, if the ranks are well."""
        if self._checkpoint_begun is not None and self._pools.learner.failure is None:
            try:
                await self._checkpoints.stored(self._pools.learner)
            except (VolleyError, OSError) as error:
                log.warning("the checkpoint of step %d is lost: %s", self._checkpoint_begun.step, error)
            else:
                await self._note_checkpoint()

    async def _note_checkpoint(self) -> None:
        begun, self._checkpoint_begun = self._checkpoint_begun, None
        if begun is not None:
            self._context.status.set(checkpoint=begun.step, checkpointed=time.time())
            seconds = time.monotonic() - begun.at
            await self._recorder.event("checkpoint", step=begun.step, seconds=seconds, waited_seconds=begun.waited)

    async def _evaluate(self, version: int) -> None:
        run, plan = self._run, self._run.job.evaluation
        if plan is None:
            return
        in_flight = max_groups_in_flight(run.job.actors, plan.sampling.n)
        pools = self._pools
        sampler = Sampler(
            pools.actors, pools.rewards, plan.sampling, in_flight, run.job.seed, pools.episodes or run.turns
        )
        sampled = await sampler.sample(run.heldout)
        try:
            problem = unscored_problem(sampled)
        except HostError as nothing_scored:  # whether training can go on is for the coordinator to find out
            await self._recorder.event("trouble", problem=f"no evaluation of version {version}: {nothing_scored}")
            return
        if problem:
            await self._recorder.event("trouble", problem=f"evaluation of version {version}: {problem}")
        prompts = [encoded.prompt for encoded in run.heldout]
        terms, seed = run.job.evaluated_terms, run.job.seed
        evaluation = summarise(prompts, sampled, plan.ks, terms=terms, version=version, seed=seed)
        await self._recorder.evaluation(evaluation)
