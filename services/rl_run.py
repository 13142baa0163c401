"""Run a job of kind ``rl``: start the three roles side by side, hand them to the coordinator, export the result."""

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.pool import ActorPool
from learner.group import LearnerGroup
from reward_servers.pool import RewardPool
from reward_servers.scorers import check_scorer
from services import plots
from services.checkpoints import save_checkpoint, steps_of
from services.coordinator import Coordinator, ResumePoint
from services.dataset import read_prompts
from services.desired import read_desired
from services.display import Display
from services.evaluate import Evaluation, evaluate, groups_at_once
from services.recorder import RunRecorder
from services.run_folder import RunFolder
from services.start import start_all
from services.store import RunStore
from services.tokens import EncodedPrompt, encode_prompts, load_tokenizer, model_length
from services.wiring import actor_config, reward_config, rl_learner_config
from volley.job import InRunEvaluation, RLJob


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was read and checked before any process started."""

    prompts: list[EncodedPrompt]
    heldout: list[EncodedPrompt]
    length: int


def prepare(job: RLJob) -> Prepared:
    """Read and check data, scorer and lengths; raises `JobError` for what can not be used."""
    prompts = read_prompts(job.data)
    heldout = read_prompts(job.evaluation.data) if job.evaluation else []
    check_scorer(job.scorer, prompts)
    check_scorer(job.scorer, heldout)
    tokenizer, length = load_tokenizer(job.model.path), model_length(job.model.path)
    encoded = encode_prompts(tokenizer, prompts, room=job.sampling.max_tokens, length=length)
    held = []
    if job.evaluation:
        room, key = job.evaluation.sampling.max_tokens, "evaluation.sampling.max_tokens"
        held = encode_prompts(tokenizer, heldout, room=room, length=length, key=key)
    return Prepared(encoded, held, length)


async def run(
    job: RLJob,
    prepared: Prepared,
    folder: RunFolder,
    store: RunStore,
    display: Display,
    checkpoint: Path | None = None,
) -> None:
    """The whole run, or what is left of it after ``checkpoint``. The roles are stopped whatever happens."""
    recorder = RunRecorder(folder, store, display, job.samples_kept)
    display.say(
        f"{job.name}: starting {job.actors.count} actor(s), {job.reward_workers.count} reward worker(s), "
        f"{job.learner.ranks} learner rank(s)"
    )
    async with contextlib.AsyncExitStack() as stack:
        actors, rewards, learner = await start_all(
            stack,
            ActorPool.start(actor_config(job, prepared.length, folder)),
            RewardPool.start(reward_config(job, folder)),
            LearnerGroup.start(rl_learner_config(job, folder)),
        )
        if checkpoint:
            folder.rewind(steps_of(checkpoint))
        resume = await _take_up(checkpoint, learner, actors) if checkpoint else None
        done = resume.step if resume else 0
        recorder.start_clock()
        await recorder.event("resumed" if resume else "started", step=done)

        async def evaluate_now(_version: int) -> None:
            if job.evaluation is not None:
                plan = job.evaluation
                await recorder.evaluation(await _evaluate(job, plan, prepared.heldout, actors, rewards))

        with display.bar(f"{job.name} steps", job.steps, done) as bar:
            recorder.bar = bar
            await Coordinator(
                job,
                prepared.prompts,
                actors=actors,
                rewards=rewards,
                learner=learner,
                recorder=recorder,
                evaluate=evaluate_now,
                checkpoint=partial(save_checkpoint, learner, folder, job.checkpoint.keep),
                changes=lambda: read_desired(folder).objective,
                resume=resume,
            ).run()
        await learner.export(folder.model)
    plots.learning_curves(folder)
    display.say(f"  model: {folder.model}")


async def _take_up(checkpoint: Path, learner: LearnerGroup, actors: ActorPool) -> ResumePoint:
    """Bring learner and actors to where ``checkpoint`` was written."""
    state = await learner.load(checkpoint)
    step = int(state["step"])
    await actors.broadcast(await learner.publish(step))
    return ResumePoint.of(step, state)


async def _evaluate(
    job: RLJob, plan: InRunEvaluation, heldout: list[EncodedPrompt], actors: ActorPool, rewards: RewardPool
) -> Evaluation:
    return await evaluate(
        heldout,
        plan.sampling,
        plan.ks,
        actors=actors,
        rewards=rewards,
        at_once=groups_at_once(job.actors, plan.sampling.n),
        seed=job.seed,
        on_group=lambda: None,
    )
